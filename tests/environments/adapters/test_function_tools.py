"""Plain functions as tools, and those of verl, in the class of docs/environments.md."""

import sys
from pathlib import Path

import pytest

from tests.environments.adapters.playing import call, play, save

SEARCH = '''
{decorator}
{kind} {name}(word: str) -> str:
    """Looks up a word.

    Args:
        word: The word to look up.
    """
    return {{"cat": "an animal"}}[word]
'''


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("verl", [False, True])
def test_functions_are_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, verl: bool) -> None:
    if verl:
        pytest.importorskip("verl.tools.function_tool")
    decorator = f"from verl.tools.function_tool import function_tool\n\n@function_tool('{kind}')"
    code = SEARCH.format(kind=kind, name="look_up", decorator=decorator if verl else "")
    (tmp_path / "search.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "search", raising=False)
    factory = save(tmp_path, "Library")
    (tool,) = factory.describe()["tools"]
    assert tool["function"]["name"] == "look_up" and "word" in tool["function"]["parameters"]["properties"]
    replies, reward = play(factory, {}, call("look_up", word="cat"), call("look_up", word="dog"), "Done.")
    contents = [reply.observation[0]["content"] for reply in replies[1:3] if reply.observation]
    assert contents == ["an animal", "error: KeyError: 'dog'"] and replies[3].done and reward is None


def test_a_function_may_have_another_name_than_the_tool(tmp_path: Path) -> None:
    code = SEARCH.format(kind="def", name="other", decorator="")
    code += "\n\nclass Words:\n    find = staticmethod(other)\n\n    def reset(self): pass\n"
    factory = save(tmp_path, "Words", code)
    assert [tool["function"]["name"] for tool in factory.describe()["tools"]] == ["find"]
    replies, _ = play(factory, {}, call("find", word="cat"))
    assert replies[1].observation == [{"role": "tool", "name": "find", "content": "an animal"}]
