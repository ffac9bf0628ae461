"""`report.html`: one self-contained page about a run, made from its run directory and nothing else.

    write_report(Path("runs/addition"))   ->   runs/addition/report.html

The page loads nothing (its own content security policy forbids it), reads in light and dark, and works at any moment
of a run: what is missing or damaged is said on the page instead of failing. All text from models and data is inert.

data.py reads the run directory, charts.py draws, page.py puts the page together, assets/ holds its template.
"""

from lockstep.report.page import write_report

__all__ = ["write_report"]
