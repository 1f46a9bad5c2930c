"""What the benchmarks' pictures share. Import pyplot from here: it is set up to draw without a screen."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure


matplotlib.use("Agg")
import matplotlib.pyplot as plt


__all__ = ["BLACK", "BLUE", "GREEN", "ORANGE", "PURPLE", "SKY", "VERMILLION", "plt", "save"]

# Okabe and Ito's colours, told apart by colour-blind readers too.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"


def save(figure: Figure, path: Path, dpi: int = 110) -> None:
    """Write a figure to a file, whose folder is made if need be, and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)
