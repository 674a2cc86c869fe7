"""The commands on a real terminal: what Ctrl-C and Ctrl-D do, and what they leave behind."""

from __future__ import annotations

import sys

import pytest

if sys.platform == "win32":
    pytest.skip("needs pseudo-terminals", allow_module_level=True)

from support.held_steps import HELD_COMMAND

from .terminal import CTRL_C, CTRL_D, Terminal

ENDLESS = ("--ignore-eos", "--max-tokens", "3000", "--temperature", "0", "--num-threads", "1")


def test_chat_stops_an_answer_and_goes_on() -> None:
    with Terminal("chat", "demo", *ENDLESS, start=HELD_COMMAND) as terminal:
        terminal.expect("Ctrl-C stops an answer")
        terminal.expect("> ")
        terminal.send("Tell me a story about a cat named Lio.\n")
        terminal.expect("named Lio.")  # the echo of what was typed
        terminal.expect("\n")
        terminal.expect(" ")  # the answer is on its way
        terminal.send(CTRL_C)
        terminal.expect("(stopped)")
        terminal.expect("> ")
        terminal.send("/stats\n")
        stats = terminal.expect("output tokens")
        assert "prompt tokens" in stats
        terminal.expect("> ")
        terminal.interrupt_prompt("/exit ends")  # a hint, not the end
        terminal.expect("> ")
        terminal.send(CTRL_D)
        assert terminal.end() == 0
        terminal.assert_clean()


def test_ctrl_c_in_the_middle_of_the_demo() -> None:
    with Terminal("demo", start=HELD_COMMAND) as terminal:
        terminal.expect("streams at once")
        terminal.expect("more")  # the live board is on the screen
        assert "\x1b[?25l" in terminal.output
        terminal.send(CTRL_C)
        assert terminal.end() == 130
        terminal.assert_clean()
        assert "In figures" not in terminal.output


def test_ctrl_c_while_torch_is_imported() -> None:
    with Terminal("generate", "demo", "hi", *ENDLESS, start=HELD_COMMAND) as terminal:
        terminal.expect("importing torch")
        terminal.send(CTRL_C)
        assert terminal.end() == 130
        terminal.assert_clean()
