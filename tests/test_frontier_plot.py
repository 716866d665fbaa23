"""The picture of a measured frontier: whole XML, one point per budget and panel, where the numbers say."""

import xml.etree.ElementTree as ET

import pytest

from cachedit.evaluate.frontier_plot import HEIGHT, WIDTH, frontier_svg

SVG = "{http://www.w3.org/2000/svg}"


def columns(**changes) -> dict:
    """Two budgets of 8 steps; the scales run from 0 to 4 steps, from 1x to 4x, and from 30 to 50 dB."""
    return {"steps": [8, 8], "nfe": [2, 4], "speedup": [4.0, 2.5], "psnr": [30.0, 50.0], **changes}


def panels(svg: str) -> list[ET.Element]:
    return ET.fromstring(svg).findall(f"{SVG}g[@class='panel']")


def places(panel: ET.Element) -> list[tuple[float, float]]:
    return [(float(point.get("cx")), float(point.get("cy"))) for point in panel.findall(f"{SVG}circle")]


def texts(svg: str) -> list[str]:
    return [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")]


class TestFrontierPlot:
    def test_points_lie_where_the_numbers_say(self):
        over_nfe, over_speedup = panels(frontier_svg(columns(), "mine"))
        assert places(over_nfe) == [(WIDTH / 2, HEIGHT), (WIDTH, 0)]
        assert places(over_speedup) == [(WIDTH, HEIGHT), (WIDTH / 2, 0)]

    def test_one_line_for_each_number_of_steps_and_one_point_for_each_budget(self):
        found = columns(
            steps=[8, 20, 8, 20, 20], nfe=[2, 5, 4, 9, 7], speedup=[3, 3, 2, 2, 2.5], psnr=[20, 25, 30, 45, 35]
        )
        svg = frontier_svg(found, "mine")
        for panel in panels(svg):
            assert len(panel.findall(f"{SVG}circle")) == 5
            lines = [line.get("points").split() for line in panel.findall(f"{SVG}polyline")]
            assert [len(line) for line in lines] == [2, 3]
        assert {"8 steps", "20 steps"} <= set(texts(svg))
        longer = panels(svg)[0].findall(f"{SVG}polyline")[1].get("points").split()
        assert longer == sorted(longer, key=lambda place: float(place.split(",")[0]))

    def test_bars_span_one_standard_deviation_on_either_side(self):
        svg = frontier_svg(columns(psnr=[35.0, 45.0], psnr_spread=[5.0, 5.0]), "mine")
        bars = [bar for bar in panels(svg)[0].findall(f"{SVG}line") if bar.get("class") == "spread"]
        heights = [(float(bar.get("y1")), float(bar.get("y2"))) for bar in bars]
        assert heights == [(HEIGHT, HEIGHT / 2), (HEIGHT / 2, 0)]  # of 30 to 50 dB

    def test_tooltips(self):
        svg = frontier_svg(columns(ssim=[0.9, 0.99]), "mine")
        told = [point.find(f"{SVG}title").text for point in panels(svg)[0].findall(f"{SVG}circle")]
        assert told == [
            "2 of 8 steps computed, 4x, PSNR 30, SSIM 0.9",
            "4 of 8 steps computed, 2.5x, PSNR 50, SSIM 0.99",
        ]

    def test_identical_pictures_do_not_squeeze_the_others(self):
        svg = frontier_svg(columns(psnr=[50.0, 1000.0]), "mine")
        panel = panels(svg)[0]
        assert places(panel)[0][1] == places(panel)[1][1]
        assert panel.findall(f"{SVG}circle")[1].find(f"{SVG}title").text.endswith("identical pictures")

    def test_nothing_is_loaded_and_names_are_escaped(self):
        svg = frontier_svg(columns(), "<a> & b")
        assert texts(svg)[0] == "<a> & b"
        assert "href" not in svg
        assert "url(" not in svg

    def test_one_budget(self):
        svg = frontier_svg({"steps": [8], "nfe": [4], "speedup": [1.0], "psnr": [40.0]}, "mine")
        assert [len(places(panel)) for panel in panels(svg)] == [1, 1]

    def test_a_column_is_missing(self):
        found = columns()
        del found["speedup"]
        with pytest.raises(ValueError, match="has no speedup; allowed: one as cachedit calibrate measures it"):
            frontier_svg(found, "mine")
