"""Runs in a notebook: progress in place, the picture of a run, and mistakes as one message."""

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.api.kernels import list_text, run_cells
from tests.conftest import World

TRAIN = """
import time
run = realrl.SFT(
    {actor!r}, data={data!r}, batch=8, steps=4, device="cpu", cluster={cluster!r}, micro_batch_tokens=256,
    run_dir={run!r}, callbacks=lambda step: time.sleep(0.3),
).train()
"""


@pytest.fixture(scope="module")
def cells(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("notebook")
    given = {"actor": world.actor, "data": str(world.root / "sft.jsonl")}
    codes = [f"import realrl\nACTOR, DATA = {world.actor!r}, {str(world.root / 'ppo.jsonl')!r}"]
    for cluster in ("1x1", "1x2"):
        codes += [TRAIN.format(**given, cluster=cluster, run=str(directory / f"run-{cluster}")), "run"]
    return run_cells([*codes, *MISTAKES], directory, errors=True)


@pytest.mark.parametrize("number", [1, 3], ids=["1x1", "1x2"])
def test_progress_is_one_output_that_is_updated_in_place(cells: list[dict[str, Any]], number: int) -> None:
    cell = cells[number]
    (line,) = list_text(cell, "display_data")
    assert re.match(r"step 4/4 \d+\.\d\d s: loss ", line)
    assert cell["updates"] >= 1
    printed = "".join(list_text(cell, "stream"))
    assert "done in" in printed and "step 1/4" not in printed and "\x1b" not in printed


@pytest.mark.parametrize(("number", "ranks"), [(2, 1), (4, 2)])
def test_a_run_shows_when_each_rank_did_what(cells: list[dict[str, Any]], number: int, ranks: int) -> None:
    (output,) = cells[number]["outputs"]
    page = ElementTree.fromstring(output["data"]["text/html"])
    texts = ["".join(element.itertext()).strip() for element in page.iter()]
    assert any(text.startswith(f"Step 4 on {ranks} rank") for text in texts)
    rows = [text for text in texts if re.fullmatch(r"rank \d", text)]
    assert rows == [f"rank {rank}" for rank in range(ranks)]
    boxes = [text for text in texts if text.startswith("run actor.train")]
    assert sum("measured" in box for box in boxes) >= ranks
    cells_of = [[cell.text for cell in row] for row in page.iter("tr")]
    (train,) = [row for row in cells_of if row[0] == "actor.train"]
    assert float(str(train[3])) > 0 and "d" in str(train[1])
    assert not [element for element in page.iter() if element.tag.endswith("script")]


MISTAKES = {
    "realrl.GRPO(model='m', data='d.jsonl', reward=len, sampels=4)": "grpo has no argument sampels; did you mean",
    "realrl.SFT('m', data='absent.jsonl', run_dir='x', cluster='1x1').check()": "absent.jsonl",
    "realrl.algorithm('absent.py')": "absent.py",
    "realrl.Run('absent')": "absent is not the directory of a run",
    "realrl.Sampling(n=0)": "n=0 is not a whole number above 0",
    "realrl.LLM(ACTOR, micro_batch=3)": "micro_batch",
    "realrl.Session({'actor': ACTOR}, train='critic')": "train: critic is not one of the models",
    "session = realrl.Session({'actor': ACTOR}, train='actor', device='cpu', cluster='1x1')\n"
    "batch = session.batch(['one'], ['two'])\n"
    "batch['x'] = [1, 2]": "one number or row for each of the 1 sequences",
    "session.infer('critic', batch)": "there is no model 'critic'; the session has actor",
    "remote = realrl.Session({'actor': ACTOR}, train='actor', device='cpu', cluster='1x2')\n"
    "remote.forward_backward('actor', batch, lambda model, _: -model.logprobs)": "a batch of 1 sequences cannot be",
    "batch = remote.batch(['one', 'two'], ['three', 'four'])\n"
    "remote.forward_backward('actor', batch, lambda model, _: model.logprobs.mean())": "do not average it yourself",
    "def broken(completions, **_):\n"
    "    return [1 / 0 for _ in completions]\n"
    "realrl.GRPO(ACTOR, reward=broken, data=DATA, samples=2, batch=4, steps=1, max_new_tokens=4, device='cpu',\n"
    "    cluster='1x1', run_dir='broken').train()": "ZeroDivisionError",
}
"""Cells with a mistake, and a part of their message."""


def test_a_mistake_is_one_message_under_the_line_of_the_cell(cells: list[dict[str, Any]]) -> None:
    for (code, message), cell in zip(MISTAKES.items(), cells[-len(MISTAKES) :], strict=True):
        (text,) = list_text(cell, "error")
        lines = text.splitlines()
        assert "/realrl/" not in text and "IPython" not in text, text
        assert re.match(r"realrl\.(User|Run)Error: ", lines[-1]) and message in text, text
        assert "broken" in code or text.count("Error: ") == 1, text
        assert code.splitlines()[-1].strip()[:20] in text or "train()" in text, text
