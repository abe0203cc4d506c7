"""What a notebook shows of a run."""

import shutil
from pathlib import Path
from xml.etree import ElementTree

from realrl.api.run_results import Run
from realrl.program.trace_file import TRACES, make_event
from tests.cli.monitoring.written_runs import write_run, write_step

HOSTILE = '"><img src=x onerror=alert(1)><script>alert(2)</script>'


def test_a_measured_step_is_drawn_beside_the_predicted_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_step(run)
    page = ElementTree.fromstring(Run(run)._repr_html_())
    texts = ["".join(element.itertext()).strip() for element in page.iter()]
    assert "Step 40 on 2 ranks: 2.00 s measured, 1.00 s predicted." in texts
    assert [text for text in texts if text in ("rank 0", "rank 1", "predicted")] == [
        "rank 0",
        "predicted",
        "rank 1",
        "predicted",
    ]
    titles = [title.text or "" for title in page.iter("{http://www.w3.org/2000/svg}title")]
    assert sum("on\trank 1, measured" in title for title in titles) == 2
    assert {"generate", "train"} <= set(texts)


def test_what_a_run_says_is_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<b>run")
    call = f"run        <i>{HOSTILE.replace(' ', '')} [<u>] on d1 t1 p1 @0 mb=1"
    write_step(run, extra=[make_event(0, call, 5e15, 9e5, {"step": 39, "error": HOSTILE})])
    (run / "samples").mkdir()
    (run / "samples" / "step-000030.jsonl").write_text(
        '{"prompt": "<script>", "completion": "</div>"}\n'
        '{"prompt": "A", "completion": "B", "trajectory": [{"text": " <u>", "sampled": true}, {"text": "C"}]}\n'
    )
    text = Run(run)._repr_html_()
    page = ElementTree.fromstring(text)
    tags = {element.tag.rpartition("}")[2] for element in page.iter()}
    assert not tags & {"script", "img", "i", "u", "b1"}
    assert not [name for element in page.iter() for name in element.attrib if name.startswith("on")]
    assert "onerror=alert(1)" in "".join(page.itertext()) and "</div>" in "".join(page.itertext())
    # Turns of the model are marked.
    assert "A [[<u>]]\nC" in "".join(page.itertext())


def test_a_run_without_a_trace_says_which_setting_makes_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_step(run)
    shutil.rmtree(run / TRACES)
    text = Run(run)._repr_html_()
    assert "debug.traced_steps" in text and "<svg" not in text
