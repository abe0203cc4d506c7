"use strict";
const plot = document.querySelector(".plot"), scroller = document.querySelector(".scroller");
const tip = document.querySelector("#tip");
let zoom = 1;

// Show the most detailed label that fits into its box.
function chooseLabels() {
  const width = plot.getBoundingClientRect().width;
  for (const box of plot.querySelectorAll(".box")) {
    const room = (parseFloat(box.getAttribute("width")) / 100) * width;
    let free = true;
    for (const label of box.querySelectorAll(".label")) {
      const fits = free && label.dataset.width <= room;
      label.toggleAttribute("hidden", !fits);
      free &&= !fits;
    }
  }
  for (const [level, least] of [[1, 3], [2, 12]])
    for (const tick of plot.querySelectorAll(`.level${level}`))
      tick.setAttribute("visibility", zoom >= least ? "visible" : "hidden");
}

// Enlarge the time axis. The time at `pointer` pixels from the left stays there.
function enlarge(factor, pointer = scroller.clientWidth / 2) {
  const before = zoom;
  zoom = Math.min(64, Math.max(1, zoom * factor));
  const time = (scroller.scrollLeft + pointer) / before;
  plot.style.width = `${zoom * 100}%`;
  scroller.scrollLeft = time * zoom - pointer;
  chooseLabels();
}

for (const button of document.querySelectorAll("[data-zoom]"))
  button.addEventListener("click", () => enlarge(Number(button.dataset.zoom) || 1 / zoom));
scroller.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  enlarge(Math.exp(-event.deltaY / 300), event.clientX - scroller.getBoundingClientRect().left);
}, { passive: false });
new ResizeObserver(chooseLabels).observe(scroller);

function showTip(target, x, y) {
  const [title, ...rows] = target.dataset.tip.split("\n");
  tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: title }));
  for (const row of rows)
    for (const text of row.split("\t"))
      tip.append(Object.assign(document.createElement("span"), { textContent: text }));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(8, y - height - 10) : y + 18}px`;
}

// Highlight everything that belongs to one call.
let lit = "";
function light(call) {
  if (call === lit) return;
  lit = call;
  document.body.classList.toggle("focused", call !== "");
  for (const element of document.querySelectorAll("[data-call]"))
    element.classList.toggle("lit", element.dataset.call === call);
}

addEventListener("pointermove", (event) => {
  const target = event.target.closest("[data-tip]");
  if (target) showTip(target, event.clientX, event.clientY);
  else tip.hidden = true;
  light(event.target.closest("[data-call]")?.dataset.call ?? "");
});
document.addEventListener("pointerleave", () => { tip.hidden = true; light(""); });
addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
