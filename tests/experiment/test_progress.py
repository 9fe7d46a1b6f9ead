import io

from rich.console import Console

from fedvi.experiment.progress import RunProgress


def show(terminal):
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=200)
    with RunProgress("fedavg", 20, done=10, console=console) as progress:
        progress.print("WARNING: [3] clients")
        progress.advance(5, "round 15/20  loss 0.5")
    return output.getvalue()


def test_elsewhere_than_on_a_terminal_there_is_a_line_per_evaluation():
    assert show(False) == "WARNING: [3] clients\nround 15/20  loss 0.5\n"


def test_on_a_terminal_there_is_a_bar():
    text = show(True)
    assert "fedavg" in text and "15/20" in text and "WARNING: [3] clients" in text
