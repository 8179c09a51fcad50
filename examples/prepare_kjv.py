"""Turns the output of Debian's `bible` (package bible-kjv) into the text that train_tiny.py reads.

    sudo apt-get install -y bible-kjv
    python examples/prepare_kjv.py .corpus/kjv.txt

The King James text of 1611 is in the public domain. `bible -f` prints one verse a line, "Ge1:1 In the
beginning ...". We write one chapter after another, a heading ("Genesis 1") and then one verse a line without
its number, with an empty line between two chapters. The split into training, validation and held-out chapters
is not in the file: it is a rule on the chapter's number (see kjv_corpus.split_chapters), so that every script
applies the same one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

# What `bible -f` calls the books, in order, and how we head their chapters.
BOOKS = {
    "Ge": "Genesis", "Exo": "Exodus", "Lev": "Leviticus", "Num": "Numbers", "Deu": "Deuteronomy",
    "Josh": "Joshua", "Jdgs": "Judges", "Ruth": "Ruth", "1Sm": "1 Samuel", "2Sm": "2 Samuel",
    "1Ki": "1 Kings", "2Ki": "2 Kings", "1Chr": "1 Chronicles", "2Chr": "2 Chronicles", "Ezra": "Ezra",
    "Neh": "Nehemiah", "Est": "Esther", "Job": "Job", "Psa": "Psalms", "Prv": "Proverbs",
    "Eccl": "Ecclesiastes", "SSol": "Song of Solomon", "Isa": "Isaiah", "Jer": "Jeremiah",
    "Lam": "Lamentations", "Eze": "Ezekiel", "Dan": "Daniel", "Hos": "Hosea", "Joel": "Joel",
    "Amos": "Amos", "Obad": "Obadiah", "Jonah": "Jonah", "Mic": "Micah", "Nahum": "Nahum",
    "Hab": "Habakkuk", "Zep": "Zephaniah", "Hag": "Haggai", "Zec": "Zechariah", "Mal": "Malachi",
    "Mat": "Matthew", "Mark": "Mark", "Luke": "Luke", "John": "John", "Acts": "Acts", "Rom": "Romans",
    "1Cor": "1 Corinthians", "2Cor": "2 Corinthians", "Gal": "Galatians", "Eph": "Ephesians",
    "Phi": "Philippians", "Col": "Colossians", "1Th": "1 Thessalonians", "2Th": "2 Thessalonians",
    "1Tim": "1 Timothy", "2Tim": "2 Timothy", "Titus": "Titus", "Phmn": "Philemon", "Heb": "Hebrews",
    "Jas": "James", "1Pet": "1 Peter", "2Pet": "2 Peter", "1Jn": "1 John", "2Jn": "2 John", "3Jn": "3 John",
    "Jude": "Jude", "Rev": "Revelation",
}  # fmt: skip
VERSE = re.compile(r"(\d?[A-Za-z]+)(\d+):(\d+) (.+)")
NUM_CHAPTERS, NUM_VERSES = 1189, 31102


def chapters_from_verses(lines: list[str]) -> list[str]:
    """Groups verse lines into chapters: "heading\\nverse\\nverse\\n". Raises ValueError on a line it can't
    read."""
    chapters: list[str] = []
    current: tuple[str, str] | None = None
    for number, line in enumerate(lines, 1):
        match = VERSE.fullmatch(line.strip())
        if match is None or match[1] not in BOOKS:
            raise ValueError(f"line {number} is no verse of the form 'Ge1:1 text' of a known book: {line[:60]!r}")
        place, verse = (match[1], match[2]), " ".join(match[4].split())
        if place != current:
            chapters.append(f"{BOOKS[match[1]]} {match[2]}\n")
            current = place
        chapters[-1] += verse + "\n"
    return chapters


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="text file to write, e.g. .corpus/kjv.txt")
    parser.add_argument("--raw", type=Path, help="a saved output of `bible -f 'gen1:1-rev22:21'` instead of running it")
    args = parser.parse_args()
    if args.raw:
        raw = args.raw.read_text(encoding="utf-8")
    else:
        try:
            raw = subprocess.run(
                ["bible", "-f", "gen1:1-rev22:21"],
                check=True,
                capture_output=True,
                text=True,
                encoding="utf-8",
            ).stdout
        except FileNotFoundError:
            print("the command `bible` is missing: install the Debian package bible-kjv", file=sys.stderr)
            return 1
    chapters = chapters_from_verses(raw.splitlines())
    num_verses = sum(chapter.count("\n") - 1 for chapter in chapters)
    if (len(chapters), num_verses) != (NUM_CHAPTERS, NUM_VERSES):
        print(
            f"got {len(chapters)} chapters and {num_verses} verses, expected {NUM_CHAPTERS} and {NUM_VERSES}",
            file=sys.stderr,
        )
        return 1
    text = "\n".join(chapters)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text, encoding="utf-8")
    print(f"{args.out}: {len(chapters)} chapters, {num_verses} verses, {len(text.encode())} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
