addEventListener("beforeprint", () => { enlarge(1 / zoom); });

for (const button of document.querySelectorAll("[data-copy]"))
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
