"""The page of `jaxpar explain --html` in a real browser: `nox -s browser`, not the plain tests.

The record is that of a small program on CPU devices. Screenshots are left in `$SCREENSHOTS`, if it
is set.
"""

import os
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from playwright.sync_api import sync_playwright

from jaxpar.schedule import Chip, compile_for, explain, target
from jaxpar.tools.cli.explain_page import page_of

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDE, NARROW = 1200, 400  # pixels
# The alpha of one pixel, read from a copy: what is read itself is drawn another way from then on.
ALPHA = """
window.alphaAt = (x, y) => {
  const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, -Math.round(x), -Math.round(y));
  return pen.getImageData(0, 0, 1, 1).data[3];
};
"""
HOSTILE = "</script><script>window.ran = true</script><img src=x onerror='window.ran = true'>"


def layer(x, w):
    return lax.all_gather(x, "tp", tiled=True) @ w


def step(x, up, down):
    h = jnp.sin(layer(x, up))
    return lax.psum_scatter(jnp.sin(h @ down), "tp", tiled=True)


@pytest.fixture(scope="session")
def record():
    here = target("here", "tp=8")
    specs = (P("tp"), P(None, "tp"), P("tp"))
    sizes = ((512, 256), (256, 1024), (1024, 256))
    args = [
        jax.ShapeDtypeStruct(size, jnp.float32, sharding=spec)
        for size, spec in zip(sizes, specs, strict=True)
    ]
    chip = Chip("cpu", flops=1e11, hbm=1e10, capacity=1e10, link=1e9, torus=False)
    mapped = jax.shard_map(step, in_specs=specs, out_specs=P("tp"))
    program = compile_for(mapped, here, *args)
    found = explain(replace(program, target=replace(here, chip=chip)), tries=2).record()
    assert len(found["findings"]) > 1
    assert found["at_peak"]
    where = found["findings"][0]["of"]["line"]
    copies = {"kind": "copies", "seconds": 2e-6, "what": "copy.1, f32[8]", "scopes": ["mlp"]}
    found["overheads"] = [{**copies, "line": where}]
    return found


@pytest.fixture(scope="session")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert found, f"none of {', '.join(BROWSERS)} is on the PATH: apt-get install chromium"
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a record's page offline; afterwards it must have asked for nothing and said nothing."""
    contexts, said, asked = [], [], []

    def opens(record, width=WIDE, height=800, **options):
        path = tmp_path / "step.html"
        path.write_text(page_of(record))
        contexts.append(
            browser.new_context(
                viewport={"width": width, "height": height}, offline=True, **options
            )
        )
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        page.evaluate(ALPHA)
        return page

    yield opens
    for context in contexts:
        context.close()
    assert said == []
    assert set(asked) <= {(tmp_path / "step.html").as_uri()}


def view(page):
    """From when to when the timeline shows, in microseconds."""
    return page.evaluate("[from, to]")


def middle(page):
    """The middle of the timeline on the screen."""
    page.locator("#timeline").scroll_into_view_if_needed()
    box = page.locator("#timeline").bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def place_of_first(page, kind="compute"):
    """Where the first long event of a kind is on the screen, and its name."""
    page.locator("#timeline").scroll_into_view_if_needed()
    return page.evaluate(
        """kind => {
          const event = data.events.filter(e => e[1] === kind).sort((a, b) => b[5] - a[5])[0];
          const box = canvas.getBoundingClientRect();
          const at = (event[4] + event[5] / 2 - from) / (to - from) * canvas.clientWidth;
          return [box.x + at, box.y + TOP + LANE * lanes.indexOf(event[0]) + 20, event[2]];
        }""",
        kind,
    )


def strength(page, name):
    """How opaque an event is drawn, of 255."""
    return page.evaluate(
        """name => {
          const event = data.events.filter(e => e[2] === name).sort((a, b) => b[5] - a[5])[0];
          const scale = window.devicePixelRatio, middle = event[4] + event[5] / 2;
          const x = (middle - from) / (to - from) * canvas.clientWidth * scale;
          const y = (TOP + LANE * lanes.indexOf(event[0]) + 22) * scale;
          return alphaAt(x, y);
        }""",
        name,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_shows_everything_without_scrolling_sideways(opened, record, width, scheme):
    page = opened(record, width, color_scheme=scheme)
    shown = page.locator("body").inner_text()
    for text in ("all-gather", "layer", "In memory at the peak", "Beyond transfers", "copy.1"):
        assert text in shown
    assert page.locator("#at_peak tr").count() == len(record["at_peak"]) + 1
    assert page.locator("#overheads tr").count() == len(record["overheads"]) + 1
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    text = page.evaluate("getComputedStyle(document.body).color")
    lightness = [sum(map(int, colour[4:-1].split(","))) for colour in (back, text)]
    assert (lightness[0] < lightness[1]) == (scheme == "dark")
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(folder, f"{width}-{scheme}.png"), full_page=True)


def test_the_timeline_follows_the_scheme(opened, record):
    page = opened(record, color_scheme="light")
    before = page.evaluate("canvas.toDataURL()")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("before => canvas.toDataURL() !== before", arg=before)


def test_findings_open_and_close(opened, record):
    page = opened(record)
    boxes = page.locator("#findings details")
    assert boxes.count() == len(record["findings"])
    assert boxes.first.get_attribute("open") is not None
    assert boxes.nth(1).get_attribute("open") is None
    assert not boxes.nth(1).locator("dl").is_visible()
    boxes.nth(1).locator("summary").click()
    assert boxes.nth(1).locator("dl").is_visible()
    boxes.first.locator("summary").click()
    assert boxes.first.get_attribute("open") is None


def test_search_dims_what_does_not_match(opened, record):
    page = opened(record)
    [gather] = {event["name"] for event in record["events"] if event["kind"] == "transfer"} & {
        record["findings"][0]["of"]["names"][0]
    }
    _, _, compute = place_of_first(page)
    before = strength(page, gather), strength(page, compute)
    assert min(before) == 255
    page.locator("#search").fill(gather.upper())
    assert strength(page, gather) == 255
    assert strength(page, compute) < 100
    page.locator("#search").fill("")
    assert (strength(page, gather), strength(page, compute)) == before


def test_zooms_by_buttons_wheel_and_keys(opened, record):
    page = opened(record)
    start, end = view(page)
    assert start == 0
    assert end == pytest.approx(record["seconds"] * 1e6)

    def length():
        begin, finish = view(page)
        return (finish - begin) / end

    page.locator("#in").click()
    assert length() == pytest.approx(0.5)
    page.locator("#out").click()
    assert length() == pytest.approx(1)
    x, y = middle(page)
    page.mouse.move(x - 200, y)
    at = page.evaluate("x => timeAt(x - canvas.getBoundingClientRect().x)", x - 200)
    for _ in range(3):
        page.mouse.wheel(0, -100)
    page.wait_for_function("to - from < .6 * data.total")
    assert length() == pytest.approx(0.8**3)
    again = page.evaluate("x => timeAt(x - canvas.getBoundingClientRect().x)", x - 200)
    assert again == pytest.approx(at, rel=0.01)  # what is under the pointer stays there
    page.locator("#all").click()
    assert view(page) == [start, end]
    page.locator("#timeline").focus()
    page.keyboard.press("+")
    assert length() == pytest.approx(0.5)
    before = view(page)
    page.keyboard.press("ArrowRight")
    assert view(page)[0] == pytest.approx(before[0] + 0.05 * end)
    page.keyboard.press("ArrowLeft")
    assert view(page) == pytest.approx(before)
    page.keyboard.press("-")
    assert view(page) == pytest.approx([start, end])


def test_a_drag_moves_and_a_tap_tells(opened, record):
    page = opened(record)
    x, y, name = place_of_first(page)
    page.mouse.click(x, y)
    assert name in page.locator("#hint").inner_text()
    page.locator("#in").click()
    before, said = view(page), page.locator("#hint").inner_text()
    x, y = middle(page)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 100, y, steps=4)
    page.mouse.up()
    width = page.locator("#timeline").bounding_box()["width"]
    moved = view(page)[0] - before[0]
    assert moved == pytest.approx(100 / width * (before[1] - before[0]), rel=0.05)
    assert page.locator("#hint").inner_text() == said  # a drag tells nothing


def test_fingers_pinch_and_tap(opened, record):
    page = opened(record, NARROW, has_touch=True, is_mobile=True)
    x, y, name = place_of_first(page)
    page.touchscreen.tap(x, y)
    assert name in page.locator("#hint").inner_text()
    x, y = middle(page)
    touch = page.context.new_cdp_session(page)

    def fingers(kind, *places):
        points = [{"x": place, "y": y, "id": n} for n, place in enumerate(places)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    fingers("touchStart", x - 30)
    fingers("touchStart", x - 30, x + 30)
    for apart in (40, 50, 60):
        fingers("touchMove", x - apart, x + apart)
    fingers("touchEnd")
    begin, end = view(page)
    assert end - begin == pytest.approx(record["seconds"] * 1e6 / 2, rel=0.1)
    assert name in page.locator("#hint").inner_text()


def test_a_finding_is_shown_in_the_timeline(opened, record):
    page = opened(record, NARROW)
    page.locator("#findings details").nth(1).locator("summary").click()
    page.locator("#findings details").nth(1).locator("button").click()
    begin, end = view(page)
    names = set(record["findings"][1]["of"]["names"])
    events = [event for event in record["events"] if event["name"] in names]
    assert begin <= min(event["start"] for event in events) * 1e6
    assert end >= max(event["end"] for event in events) * 1e6
    assert end - begin < record["seconds"] * 1e6
    box = page.locator("#timeline").bounding_box()
    assert -1 <= box["y"] < 800


def test_texts_of_a_program_run_no_script(opened, record):
    hostile = deepcopy(record)
    hostile["target"] = hostile["findings"][0]["why"] = hostile["findings"][0]["edit"] = HOSTILE
    hostile["findings"][0]["of"]["scopes"] = [HOSTILE]
    hostile["findings"][0]["of"]["line"]["function"] = HOSTILE
    hostile["at_peak"][0]["what"] = hostile["overheads"][0]["what"] = HOSTILE
    for event in hostile["events"]:
        event["op"] = event["name"] = event["row"] = f"{HOSTILE}<!--<script>"
    page = opened(hostile, NARROW)
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW
    x, y, _ = place_of_first(page)
    page.mouse.click(x, y)
    assert HOSTILE in page.locator("#hint").inner_text()
    assert HOSTILE in page.locator("#findings").inner_text()
    assert page.evaluate("window.ran") is None
    assert page.locator("img").count() == 0


def test_a_long_timeline_is_drawn_at_once(opened, record):
    long = deepcopy(record)
    template = long["events"][0]
    long["events"] = [
        {
            **template,
            "name": f"fusion.{n}",
            "row": ("compute", "tp +1", "tp -1", "memory")[n % 4],
            "start": n * 1e-6,
            "end": (n + 0.8) * 1e-6,
        }
        for n in range(50_000)
    ]
    long["seconds"] = 0.05
    page = opened(long)
    assert page.evaluate("data.events.length") == 50_000
    took = """() => {
      const start = performance.now();
      %s;
      alphaAt(9, 9);
      return performance.now() - start;
    }"""
    for does in ("draw()", "zoom(.9)", "$('search').value = '49999'; $('search').oninput()"):
        assert page.evaluate(took % does) < 1000, does
