"""The report of measured experiments, from files made by hand: what stands where, and what is said where nothing is."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from helpers.reproduced import EXPERIMENTS, LACKS, NASTY, RATIOS, edit_rows, write_reproduced
from pullback.errors import FileError, PullbackError
from pullback.report import reproduced
from pullback.report.changes import is_changed
from pullback.report.charts import LIGHT, log_ticks, nice_ticks
from pullback.report.numbers import Style, interval, number, paper_said
from pullback.report.panels import outline, ranks
from pullback.report.reproduced import MAX_BYTES, write_report
from pullback.report.results import WORDS, read_results
from pullback.runs.files import read_arrays, write_arrays

ORDER = (*EXPERIMENTS, "retrieval")


class Page(HTMLParser):
    """What a test asks about a page: its text in order, its elements, the text of each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._skipped = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._skipped += tag in ("style", "script")

    def handle_endtag(self, tag: str) -> None:
        self._skipped -= tag in ("style", "script")

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self.words += data.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def attributes(self, name: str) -> list[str]:
        return [str(attributes[name]) for _, attributes in self.elements if name in attributes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = write_reproduced(tmp_path_factory.mktemp("run") / "first")
    write_report(folder, order=ORDER, pictures=True)
    return folder


@pytest.fixture(scope="module")
def page(folder) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def text(folder) -> str:
    return (folder / "report.md").read_text(encoding="utf-8")


def rows_of(folder: Path) -> list[tuple[str, dict]]:
    return [(own.name, dict(row)) for own in read_results(folder).experiments for row in own.rows.values()]


def test_verdicts_come_first_then_the_experiments_in_the_order_of_the_paper(page, text):
    sections = [name for name in page.attributes("id") if name in ("verdicts", *ORDER, "not-run")]
    assert sections == ["verdicts", *EXPERIMENTS, "not-run"]
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "Verdicts" and headings[1:] == [
        "Four regimes", "Class tokens under pruning", "Which patches matter", "Depth under pruning",
        "Neighbours of a patch", "Not run",
    ]  # fmt: skip
    assert "1 experiment of the paper is not in this folder: retrieval." in page.text


def test_every_verdict_has_its_word_its_reason_and_its_place_in_the_paper(folder, page, text):
    for own in read_results(folder).experiments:
        for claim in own.document["claims"]:
            for part in (claim["sentence"], claim["why"], claim["where"], claim["word"]):
                assert part in page.text and part.replace("_", r"\_") in text
    for word, count in zip(WORDS, (2, 1, 1, 1), strict=True):
        assert f"{word} {count}" in page.text and f"{word} {count}" in text


def test_every_number_stands_there_with_its_interval_and_the_papers(folder, page, text):
    for own in read_results(folder).experiments:
        styles = {column["name"]: Style.of(column) for column in own.document["columns"]}
        for place, row in own.rows.items():
            if place.column == "regime":  # whole numbers, without decimals
                continue
            said = [] if row["value"] is None else [number(row["value"], styles[place.column])]
            said += [interval(row, styles[place.column])] if row["low"] is not None else []
            paper = row["paper"]
            said += [] if paper is None else [paper_said(paper, styles[place.column])]
            for part in said:
                assert part in page.text and part in text, (own.name, place, part)


def test_a_verdict_on_another_model_than_the_papers_says_so(page, text):
    shown = " ".join(page.text.split())
    assert "✓ holds on tiny-scenes, in place of the paper’s model" in shown
    assert "✗ does not hold on tiny-scenes ToMe" in shown, "of the paper's own model it is not said"
    assert "✓ holds<br>on tiny-scenes, in place of the paper’s model |" in text
    count = text.count("in place of the paper’s model |")
    assert f"**{count} of them were judged on models that stand in" in text
    assert f"{count} of them on models that stand in" in shown


def test_the_papers_numbers_stand_in_a_cell_or_a_column_of_their_own(page, text):
    assert "paper 33.36 %" in page.text and "paper ≈ 100 %" in page.text and "paper 4.06" in page.text
    assert "ours 95 % paper stages [4] 3.00 2.90–3.10 3.08" in page.text, "where there are few columns"
    assert "| stages \\[4\\] | **3.00**<br>2.90–3.10<br>paper 3.08 |" in text


def test_whole_numbers_have_no_decimals_and_shares_are_per_cent(page):
    assert "91.2 %" in page.text and " 2 " in page.text and "2.00" not in page.text


def test_what_is_absent_says_why_once_for_a_row(page, text):
    assert page.text.count(LACKS) == 2 and text.count(LACKS) == 2, "one note in each of two tables"
    assert "not a finite number" in page.text and "of the first 200 directions" in page.text
    assert "– <sup>c</sup>" in text


def test_footnotes_commands_and_where_numbers_come_from_are_there(folder, page, text):
    for own in read_results(folder).experiments:
        assert own.document["command"] in page.text and own.document["command"] in text
        assert all(note in page.text and note in text for note in own.document["footnotes"])
    for words in ("0123456789ab", "abc1234", "a machine, 1 thread", "32 images", "seed 0", "2026-01-01"):
        assert words in page.text


def test_texts_are_escaped(page, text):
    assert page.text.count(NASTY) == 2, "as text, and not as an element"
    scripts = [attributes for tag, attributes in page.elements if tag == "script"]
    assert [attributes.get("type") for attributes in scripts] == ["application/json"] * 2 + [None]
    assert "<script" not in text and "&#60;script&#62;" in text and r"\*a\_b\*" in text


def test_the_page_asks_the_network_for_nothing(folder, page):
    content = (folder / "report.html").read_text(encoding="utf-8")
    assert "http://" not in content and "https://" not in content and "@import" not in content
    assert all(link.startswith(("#", "data:")) for name in ("href", "src") for link in page.attributes(name))
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in str(policy) and "connect" not in str(policy)
    assert len(content) < MAX_BYTES


def test_links_within_the_page_lead_somewhere_and_no_name_is_there_twice(page):
    names = page.attributes("id")
    assert len(names) == len(set(names))
    links = [link[1:] for link in page.attributes("href") if link.startswith("#")]
    named = [name for attribute in ("aria-labelledby", "aria-describedby") for name in page.attributes(attribute)]
    assert set(links) | set(named) | set(page.attributes("data-copies")) <= set(names)


def test_what_is_seen_is_also_said(page):
    tags = [tag for tag, _ in page.elements]
    assert tags.count("main") == tags.count("nav") == tags.count("h1") == 1
    tables = [a for _, a in page.elements if "scroll" in str(a.get("class", ""))]
    assert tables and all(a.get("tabindex") == "0" and ("aria-labelledby" in a or "aria-label" in a) for a in tables)
    assert all("scope" in a for tag, a in page.elements if tag == "th")
    pictures = [a for tag, a in page.elements if tag == "svg" and "aria-hidden" not in a]
    assert pictures and all(a.get("role") == "img" and a.get("aria-label") for a in pictures)
    assert all(a.get("aria-label") or "fade" in str(a["class"]) for t, a in page.elements if a.get("type") == "range")


def test_every_curve_has_a_point_for_each_of_its_numbers(folder):
    content = (folder / "report.html").read_text(encoding="utf-8")
    chart = content[content.index("Degradation by ratio") :]
    chart = chart[chart.index("<svg") : chart.index("</svg>")]
    for name in ("Random", "ToMe score", "Importance"):
        assert chart.count(f"<title>tiny-scenes: {name}, 0.") == len(RATIOS) + (name == "Random") * len(RATIOS)
    assert chart.count('class="line"') == 4 and chart.count('class="band"') == 3, "three curves, and one of the paper"
    assert "DINOv2" not in chart, "a row without numbers is no curve"


def test_charts_are_files_beside_the_text_where_asked_for(folder, text):
    names = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert names == [f"report-figures/{name}.svg" for name in ("taxonomy-spectra", "cls-pruning-ratios",
                                                               "cls-pruning-operations")]  # fmt: skip
    for name in names:
        drawn = (folder / name).read_text(encoding="utf-8")
        assert drawn.startswith("<svg xmlns=") and LIGHT[0] in drawn and "prefers-color-scheme" in drawn
    write_report(folder, order=ORDER)
    assert "![" not in (folder / "report.md").read_text(encoding="utf-8")


def test_the_same_files_give_the_same_report(folder, tmp_path):
    again = write_reproduced(tmp_path / "first")
    write_report(again, order=ORDER)
    write_report(folder, order=ORDER)
    for name in ("report.html", "report.md"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


# Against another run


def test_numbers_are_compared_by_their_intervals():
    def row(value: float, width: float | None = None) -> dict:
        return {"value": value, "low": width and value - width, "high": width and value + width}

    assert not is_changed(row(1.0, 0.2), row(1.3, 0.2)) and is_changed(row(1.0, 0.2), row(1.5, 0.2))
    assert not is_changed(row(1.0), row(1.0 + 5e-7)) and is_changed(row(1.0), row(1.0 + 5e-6))
    assert not is_changed(row(1.0, 0.2), row(1.1)) and is_changed(row(1.3), row(1.0, 0.2))
    assert not is_changed(row(0.0), row(0.0)) and is_changed(row(0.0), row(1e-12))


def test_against_another_run_every_number_is_marked_and_changes_are_listed_first(folder, tmp_path):
    other = write_reproduced(tmp_path / "second", shift=0.5, seed=1)

    def altered(row: dict) -> dict | None:
        if row["row"] == "picture 0":
            return None  # gone, if the experiment no longer lists it
        return row | {"value": None, "absent": "too slow"} if row["row"] == "picture 1" else row

    edit_rows(other, "importance-maps", altered)
    path = other / "importance-maps" / "experiment.json"
    document = json.loads(path.read_text())
    document["places"] = document["places"][1:]
    path.write_text(json.dumps(document))

    written = write_report(other, folder, order=ORDER)
    page = Page((other / "report.html").read_text(encoding="utf-8"))
    assert page.attributes("id").index("changes") < page.attributes("id").index("verdicts")
    assert "The other one has seed 0 where this one has seed 1" in page.text
    assert "12 changed, 0 new, 2 gone" in page.text and written.changed == 15, "and a verdict"
    assert "≠ changed, was 3.44" in page.text and "gone, was 0.88" in page.text
    assert "✓ holds → now ✗ does not hold" in page.text
    text = (other / "report.md").read_text(encoding="utf-8")
    assert (
        "| cls-pruning | degradation | tiny-scenes: Random | 0.50 | 3.44 (3.16–3.72) | 5.16 (4.75–5.57) | changed |"
        in text
    )
    assert "paper 3.44<br>*changed, was 3.44*" in text and "<br>*same*" in text
    assert "| importance-maps | agreement | picture 0 | ρ of the head | 0.93 | – | gone |" in text

    write_report(folder, other, order=ORDER)
    assert "12 changed, 2 new, 0 gone" in Page((folder / "report.html").read_text(encoding="utf-8")).text


def test_a_run_against_itself_has_no_changes(tmp_path):
    one = write_reproduced(tmp_path / "one")
    assert write_report(one, one, order=ORDER).changed == 0
    page = Page((one / "report.html").read_text(encoding="utf-8"))
    assert "0 changed, 0 new, 0 gone" in page.text and "not alike" not in page.text and "≠ changed" not in page.text


def test_a_run_of_another_scale_or_with_other_experiments_is_said(tmp_path):
    one, other = write_reproduced(tmp_path / "one"), write_reproduced(tmp_path / "two", scale="small")
    for file in sorted((other / "taxonomy").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    write_report(one, other, order=ORDER)
    page = Page((one / "report.html").read_text(encoding="utf-8"))
    assert "has scale small where this one has scale tiny" in page.text and "Only here: taxonomy." in page.text


# What may be wrong with a folder


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(PullbackError, match=r"expected reproduce.json in .*pullback reproduce"):
        write_report(tmp_path)
    one = write_reproduced(tmp_path / "one")
    with pytest.raises(PullbackError, match=r"^against: expected reproduce.json"):
        write_report(one, tmp_path)


def test_an_unfinished_experiment_is_shown_as_that_with_its_command(tmp_path):
    folder = write_reproduced(tmp_path / "one")
    (folder / "dense-pruning" / "experiment.json").unlink()
    with open(folder / "dense-pruning" / "rows.jsonl", "a") as file:
        file.write('{"table": "half a li')  # a run goes on meanwhile
    written = write_report(folder, order=ORDER)
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert written.unfinished == ["dense-pruning"]
    assert "dense-pruning unfinished 2 numbers are on disk." in page.text
    assert "pullback reproduce dense-pruning --scale tiny --out DIR" in page.text
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "dense-pruning (unfinished)" in text
    for shown in (page.text, " ".join(text.split())):
        assert "Claims that rest on dense-pruning, retrieval are not among them: not measured to the end yet." in shown


def test_places_that_a_killed_run_has_not_reached_are_not_left_empty(tmp_path):
    folder = write_reproduced(tmp_path / "one")
    edit_rows(folder, "dense-pruning", lambda row: None if "8" in row["row"] else row)
    write_report(folder, order=ORDER)
    assert "Not measured yet: the run was ended before" in Page((folder / "report.html").read_text("utf-8")).text


@pytest.mark.parametrize("line", ["{no json}", "[1, 2]", '{"table": "t"}'])
def test_a_damaged_file_of_rows_is_named(tmp_path, line):
    folder = write_reproduced(tmp_path / "one")
    rows = folder / "cls-pruning" / "rows.jsonl"
    rows.write_text(rows.read_text() + line + "\n")
    with pytest.raises(FileError, match=r"folder: line 51 of .*rows.jsonl.*Delete .*`pullback reproduce cls-pruning`"):
        write_report(folder)


def test_a_damaged_experiment_is_named(tmp_path):
    folder = write_reproduced(tmp_path / "one")
    (folder / "taxonomy" / "experiment.json").write_text("{}")
    with pytest.raises(FileError, match=r"taxonomy.experiment.json lacks title"):
        write_report(folder)


def test_a_figure_whose_arrays_are_missing_or_wrong_is_a_sentence(tmp_path):
    folder = write_reproduced(tmp_path / "one")
    (folder / "taxonomy" / "arrays" / "spectra.npz").unlink()
    (folder / "dense-pruning" / "arrays" / "depth.npz").write_bytes(b"not a zip")
    near = folder / "output-metric" / "arrays" / "near.npz"
    arrays = read_arrays(near)
    write_arrays(near, {**arrays, "nearest": arrays["nearest"][:, :, :5]})
    maps = folder / "importance-maps" / "arrays" / "maps.npz"
    write_arrays(maps, {name: array for name, array in read_arrays(maps).items() if name != "rho"})
    write_report(folder, order=ORDER)
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    for words in ("there is no arrays/spectra.npz", "depth.npz: cannot be read", "its array nearest int64[2, 2, 5, 5]",
                  "its file has no array 'rho'"):  # fmt: skip
        assert f"This figure is not shown: {words}" in page.text or words in page.text
    assert page.text.count("This figure is not shown") == 4


def test_pictures_that_were_withheld_are_grey_and_the_figure_says_why(tmp_path):
    folder = write_reproduced(tmp_path / "one")
    for name in ("importance-maps/arrays/maps", "dense-pruning/arrays/depth", "output-metric/arrays/near"):
        path = folder / f"{name}.npz"
        arrays = read_arrays(path)
        grey = np.full_like(arrays["pictures"], 128)
        write_arrays(path, {**arrays, "pictures": grey, "withheld": np.array("not ours to publish.")})
    write_report(folder, order=ORDER, pictures=True)
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert page.text.count("not ours to publish.") == 3 and "not shown" not in page.text
    assert (folder / "report.md").read_text(encoding="utf-8").count("not ours to publish.") == 3


def test_a_folder_whose_name_does_not_tell_its_model_goes_by_its_role(tmp_path):
    folder = write_reproduced(tmp_path / "one")
    settings = json.loads((folder / "reproduce.json").read_text())
    settings |= {"saliency": "/data/saliency/backbone", "dinov2": "/data/dinov2-small"}
    (folder / "reproduce.json").write_text(json.dumps(settings))
    document = json.loads((folder / "taxonomy" / "experiment.json").read_text())
    document["claims"][0] |= {"on": ["backbone", "dinov2-small", "tiny-scenes"]}
    (folder / "taxonomy" / "experiment.json").write_text(json.dumps(document))
    write_report(folder, order=ORDER)
    assert "on saliency, dinov2-small, tiny-scenes" in (folder / "report.md").read_text(encoding="utf-8")


def test_a_page_that_would_be_too_heavy_shows_fewer_and_smaller_pictures_and_says_so(tmp_path, monkeypatch):
    folder = write_reproduced(tmp_path / "one")
    maps = folder / "dense-pruning" / "arrays" / "depth.npz"
    noise = np.random.default_rng(0).integers(0, 256, (4, 96, 96, 3), dtype=np.uint8)
    field = noise[..., 0].astype(float)
    write_arrays(maps, {"pictures": noise, "before": field, "after": field, "captions": np.array(["noise"] * 4)})
    full = write_report(folder, order=ORDER)
    assert full.remark is None
    monkeypatch.setattr(reproduced, "MAX_BYTES", int(0.9 * full.page.stat().st_size))
    less = write_report(folder, order=ORDER)
    assert less.page.stat().st_size <= reproduced.MAX_BYTES
    assert less.remark is not None and "left out" in less.remark
    assert less.remark in Page(less.page.read_text(encoding="utf-8")).text
    monkeypatch.setattr(reproduced, "MAX_BYTES", 1000)
    none = write_report(folder, order=ORDER)
    assert "shows no pictures" in str(none.remark) and "image/webp" not in none.page.read_text(encoding="utf-8")


def test_it_needs_neither_torch_nor_matplotlib_nor_experiments(folder):
    code = (
        "import sys\n"
        "for name in ('torch', 'matplotlib', 'scipy', 'pullback.experiments'): sys.modules[name] = None\n"
        "from pathlib import Path\nfrom pullback.report.reproduced import write_report\n"
        "print(write_report(Path(sys.argv[1])).page.name)"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "report.html" in done.stdout


# Small parts


@pytest.mark.parametrize(
    ("value", "style", "said"),
    [
        (0.0601, Style(digits=2), "0.060"), (1234.5, Style(), "1,234"), (3.24e-7, Style(), "3.24·10⁻⁷"),
        (-0.5, Style(), "−0.500"), (0.334, Style(percent=True), "33.4 %"), (0.0, Style(), "0"),
        (9.0, Style(whole=True), "9"), (2.5e10, Style(), "2.50·10¹⁰"),
    ],
)  # fmt: skip
def test_numbers_have_the_digits_that_their_column_wants(value, style, said):
    assert number(value, style) == said


def test_an_interval_is_written_to_the_place_of_its_number():
    assert interval({"value": 0.06, "low": 0.0551, "high": 0.066}, Style(digits=2)) == "0.055–0.066"
    assert interval({"value": 0.01, "low": -0.02, "high": 0.0449}, Style(digits=1)) == "−0.02 to 0.04"
    assert interval({"value": 1.0, "low": None, "high": None}, Style()) == ""
    assert interval({"value": 0.00646, "low": 0.00275, "high": 0.01223}, Style()) == "0.0027–0.0122", "it is wide"
    assert interval({"value": 3.4e-6, "low": 2.5e-7, "high": 9.4e-6}, Style()) == "0.2–9.4·10⁻⁶"


def test_the_papers_numbers_have_the_digits_that_they_have_there():
    shares = Style(percent=True)
    assert [paper_said(value, Style()) for value in (0.03, 270.2, 9, "N/A", 1234.5)] == [
        "0.03",
        "270.2",
        "9",
        "N/A",
        "1,234.5",
    ]
    assert [paper_said(value, shares) for value in (0.3336, 0.956, "≈ 100 %")] == ["33.36 %", "95.6 %", "≈ 100 %"]


def test_rows_with_neither_a_number_nor_one_of_the_paper_are_named_below_their_table(tmp_path):
    folder = write_reproduced(tmp_path / "one")
    edit_rows(folder, "cls-pruning", lambda row: row | {"paper": None} if row["absent"] else row)
    write_report(folder, order=ORDER)
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert f"{LACKS[0].upper()}{LACKS[1:]} : DINOv2-B: Importance." in page.text
    assert page.text.count("DINOv2-B") == 1 and "DINOv2-B: Importance" in (folder / "report.md").read_text("utf-8")


def test_a_figure_of_a_table_without_a_number_is_left_out(tmp_path):
    folder = write_reproduced(tmp_path / "one")
    edit_rows(folder, "cls-pruning", lambda row: row | ({"value": None} if row["table"] == "operations" else {}))
    write_report(folder, order=ORDER)
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert "Degradation by ratio" in page.text and "Degradation by operations" not in page.text


def test_a_long_reason_is_cut_behind_a_sentence_and_the_rest_can_be_opened(tmp_path):
    folder = write_reproduced(tmp_path / "one")
    path = folder / "importance-maps" / "experiment.json"
    document = json.loads(path.read_text())
    why = " ".join(f"Sentence number {count} of a long reason." for count in range(20))
    document["claims"][0]["why"] = why
    path.write_text(json.dumps(document))
    write_report(folder, order=ORDER)
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert why.replace("number 2 of a long reason.", "number 2 of a long reason. more", 1) in page.text
    assert why in (folder / "report.md").read_text(encoding="utf-8")


def test_ticks_are_round_and_within():
    assert [label for _, label in nice_ticks(0, 7.4, 5)] == ["0", "2", "4", "6"]
    assert [label for _, label in log_ticks(0.004, 0.3)] == ["0.005", "0.01", "0.02", "0.05", "0.1", "0.2"]
    assert [label for _, label in log_ticks(1e-6, 1.0)] == ["10⁻⁶", "10⁻⁵", "0.0001", "0.001", "0.01", "0.1", "1"]


def test_an_outline_runs_around_the_highest_quarter():
    values = np.zeros((4, 4))
    values[1:3, 1:3] = [[4, 3], [2, 1]]
    assert outline(values) == "M1 1H3M1 3H3M1 1V3M3 1V3"


def test_ranks_share_places_of_equal_values():
    assert ranks(np.array([[1.0, 5.0], [5.0, 9.0]])).tolist() == [[0.0, 0.5], [0.5, 1.0]]
