"""Pictures with the questions and answers about them, as one picture."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

COLUMNS = 4
WIDTH, SHOWN, MARGIN, LINE = 300, 200, 12, 18
LETTERS = 40  # in a line


@dataclass(frozen=True, slots=True)
class Cell:
    picture: Image.Image
    question: str
    answers: Mapping[str, str]  # by who gave them


def draw_sheet(cells: Sequence[Cell], file: Path) -> None:
    """Writes a PNG, four cells in a row; makes the folder."""
    texts = [_lines(cell) for cell in cells]
    height = SHOWN + 3 * MARGIN + LINE * max(map(len, texts))
    rows = -(-len(cells) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * WIDTH, rows * height), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for n, (cell, lines) in enumerate(zip(cells, texts, strict=True)):
        x, y = n % COLUMNS * WIDTH + MARGIN, n // COLUMNS * height + MARGIN
        sheet.paste(cell.picture.resize((SHOWN, SHOWN)), (x, y))
        for number, line in enumerate(lines):
            place = (x, y + SHOWN + MARGIN + number * LINE)
            pen.text(place, line, fill="black", font=font)
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(file)


def _lines(cell: Cell) -> list[str]:
    said = [f"{who}: {' '.join(text.split())}" for who, text in cell.answers.items()]
    return [line for text in (cell.question, *said) for line in textwrap.wrap(text, LETTERS)]
