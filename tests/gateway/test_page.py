"""The chat page: how it is served, and what it does in a browser (skipped without Chromium)."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from browser import page_of, require

from live import TARGET, TOKENIZER, WIDTH, Watched, alone, run, toy
from outrider.core.tokens import SamplingParams
from outrider.engines.drafters import ModelDrafter
from outrider.engines.tokenizer import ByteTokenizer
from outrider.engines.toy import scripted_law
from outrider.gateway.openpaths import PAGE_FILES
from outrider.gateway.page import TYPES, files
from outrider.runtime.access import hash_token
from served import HELLO, served

KEY = "sk-page"
WITH_KEY: dict[str, Any] = {"config": {"keys": {hash_token(KEY): "someone"}}}
PATIENCE = 110.0


def browsing(work: Any) -> None:
    try:
        require()
    except BaseException:
        work.close()  # skipped: a coroutine that nobody awaits would fail another test
        raise
    run(work, patience=PATIENCE)


async def say(page: Any, text: str = "hi", *, answers: int = 1, **settings: object) -> None:
    """Send a message, and wait for its answers to end."""
    for name, value in ({"max-tokens": 24, "seed": 7, "temperature": 1} | settings).items():
        await page.evaluate(
            "([id, value]) => { document.getElementById(id).value = value }", [name, str(value)]
        )
    before = await page.locator(".answer").count()
    await page.fill("#message", text)
    await page.press("#message", "Enter")
    await page.locator(".answer:not(.busy)").nth(before + answers - 1).wait_for()
    await page.locator("#send").wait_for()


def expected(**params: Any) -> str:
    chosen = {"seed": 7, "max_tokens": 24, "temperature": 1.0} | params
    return alone(SamplingParams(**chosen), tuple(TOKENIZER.chat(HELLO))).text


# -- how it is served -------------------------------------------------------------------------


def test_the_page_needs_no_key_and_its_facts_do():
    async def work() -> None:
        async with served(**WITH_KEY) as gateway:
            for path in PAGE_FILES:
                response = await gateway.http.get(path)
                assert response.status_code == 200, path
                policy = response.headers["content-security-policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert "//" not in policy
            assert (await gateway.http.get("/v1/outrider")).status_code == 401
            header = {"Authorization": f"Bearer {KEY}"}
            facts = (await gateway.http.get("/v1/outrider", headers=header)).json()
            assert facts["models"] == ["toy"]
            assert facts["draft"] == "toy-draft"
            assert facts["defaults"]["schedule"] == "freerun"
            assert "edge-only" not in facts["schedules"]
            assert KEY not in str(facts)

    run(work())


def test_a_file_that_did_not_change_is_not_sent_again():
    async def work() -> None:
        async with served() as gateway:
            first = await gateway.http.get("/static/main.js")
            again = await gateway.http.get(
                "/static/main.js", headers={"If-None-Match": first.headers["etag"]}
            )
            assert (again.status_code, again.content) == (304, b"")

    run(work())


@pytest.mark.parametrize("path", ["/static/", "/static/../app.py", "/static/%2e%2e/app.py"])
def test_nothing_but_the_listed_files_is_served(path: str):
    async def work() -> None:
        async with served() as gateway:
            assert (await gateway.http.get(path)).status_code == 404

    run(work())


def test_every_file_of_the_page_is_listed_and_none_asks_another_host():
    root = files("outrider.gateway") / "static"
    found = {
        f"{folder.name}/{file.name}" if folder is not root else file.name
        for folder in (root, root / "vendor")
        for file in folder.iterdir()
        if file.is_file() and file.name.rpartition(".")[2] in TYPES
    }
    assert found == set(PAGE_FILES.values())
    page = (root / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|https?://", page)
    for name in found:
        if name.endswith(".js") and "vendor" not in name:
            source = (root / name).read_text()
            assert "innerHTML" not in source, name
            assert "http" not in re.sub(r"`HTTP \$", "", source), name


# -- in a browser -----------------------------------------------------------------------------


@pytest.mark.browser
def test_an_answer_streams_with_an_origin_for_each_token_and_plots():
    async def work() -> None:
        async with served() as gateway, page_of(gateway.url) as page:
            await page.get_by_label("Schedule").first.select_option("sync")
            await say(page)
            assert await page.locator(".text").text_content() == expected()
            assert await page.locator(".text .t").count() == 24
            coloured = page.locator(".text").locator(".draft, .correction, .bonus, .target")
            assert await coloured.count() == 24
            counts = await page.locator("#legend .count").all_text_contents()
            assert sum(map(int, counts)) == 24
            named = await page.locator("figcaption").all_text_contents()
            assert len(named) == 6
            for caption in named[:5]:
                assert re.search(r"\d", caption), caption
            painted = await page.evaluate(PAINTED)
            assert painted[:5] == [True] * 5
            assert "24" in await page.locator("#tiles").inner_text()
            assert "ids confirmed by the cloud" in await page.locator(".facts").inner_text()

    browsing(work())


PAINTED = """() => [...document.querySelectorAll(".canvas canvas")].map((canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < data.length; i += 4) {
    const rgb = [data[i], data[i + 1], data[i + 2]];
    // a line's colour; ink and grid are grey
    if (data[i + 3] > 200 && Math.max(...rgb) - Math.min(...rgb) > 60) return true;
  }
  return false;
})"""


@pytest.mark.browser
def test_two_settings_side_by_side_say_the_same_unless_a_rule_lets_them_differ():
    async def work() -> None:
        async with served() as gateway, page_of(gateway.url) as page:
            await page.check("#compare")
            await say(page, answers=2)
            assert await page.locator(".verdict").inner_text() == "identical: 24 tokens"
            first, second = await page.locator(".text").all_text_contents()
            assert first == second == expected()
            assert await page.locator(".answer").nth(1).locator(".t.target").count() == 24
            assert await page.locator("#key-b").is_visible()
            await page.click("#new")
            rule = page.locator("#set-b").get_by_label("Acceptance rule")
            await page.locator("#set-b").get_by_label("Schedule").select_option("sync")
            await rule.select_option("ratio")
            await say(page, answers=2, **{"max-tokens": 60})
            told = await page.locator(".verdict").inner_text()
            assert re.fullmatch(
                r"different from token \d+ on: expected, since the rule ratio was in force", told
            )
            assert await page.locator(".differs").count() == 2

    browsing(work())


@pytest.mark.browser
def test_a_token_says_where_it_stands_and_what_else_was_likely():
    async def work() -> None:
        async with served() as gateway, page_of(gateway.url) as page:
            await say(page)
            await page.locator(".text").focus()
            for _ in range(3):
                await page.keyboard.press("ArrowRight")
            tip = page.locator("#tip")
            place = len(TOKENIZER.chat(HELLO)) + 2
            assert f"Position {place}," in await tip.inner_text()
            assert "log-probability" in await tip.inner_text()
            assert await tip.locator("tr").count() == 5
            focused = page.locator(".t:focus")
            assert await focused.get_attribute("aria-describedby") == "tip"
            await page.keyboard.press("Escape")
            assert await tip.is_hidden()
            await page.locator(".text .t").first.hover()
            assert f"Position {place - 2}," in await tip.inner_text()

    browsing(work())


def slow() -> Watched:
    """A target whose long answer can be stopped on its way."""
    model = Watched(TARGET)
    model.before = lambda _: time.sleep(0.005)
    return model


async def begin(page: Any) -> None:
    """Ask for a long answer, and see its first dozen tokens."""
    await page.evaluate("() => { document.getElementById('max-tokens').value = 3000 }")
    await page.fill("#message", "hi")
    await page.press("#message", "Enter")
    await page.locator(".t").nth(12).wait_for()


@pytest.mark.browser
def test_escape_stops_an_answer_on_both_sides():
    async def work() -> None:
        model = slow()
        async with served(model=model) as gateway, page_of(gateway.url) as page:
            await begin(page)
            await page.keyboard.press("Escape")
            await page.locator("#send").wait_for()
            await gateway.pair.idle()
            assert "stopped" in await page.locator(".facts").inner_text()
            assert await page.locator("#alert").is_hidden()

    browsing(work())


@pytest.mark.browser
def test_what_the_model_writes_is_never_markup():
    says = b"<img src=x onerror='document.title=1'><b>&amp;"
    start = len(TOKENIZER.chat(HELLO))
    law = scripted_law([*says], start=start, width=WIDTH, filler=ByteTokenizer.END)

    async def work() -> None:
        pair = {"model": toy(law), "draft": ModelDrafter("same", model=toy(law))}
        async with served(**pair) as gateway, page_of(gateway.url) as page:
            await say(page, **{"max-tokens": 99, "temperature": 0})
            assert await page.locator(".text").text_content() == says.decode()
            assert await page.title() == "Outrider"
            assert await page.locator("#log img, #log b").count() == 0

    browsing(work())


@pytest.mark.browser
def test_errors_are_said_with_their_fix_and_the_message_is_not_lost():
    async def work() -> None:
        async with served() as gateway, page_of(gateway.url) as page:
            await page.evaluate("() => { document.getElementById('temperature').value = 1000 }")
            await page.fill("#message", "my question")
            await page.press("#message", "Enter")
            alert = page.locator("#alert")
            await alert.wait_for()
            said = await alert.inner_text()
            assert said.startswith("temperature: ")
            assert said.endswith("Change that under Settings.")
            assert await page.input_value("#message") == "my question"
            assert await page.locator(".turn").count() == 0
            page.said.clear()  # the browser's own line about the 400
            await gateway.server.stop()
            await page.press("#message", "Enter")
            await page.get_by_text("No connection.").wait_for()
            assert "still running?" in await alert.inner_text()
            page.said.clear()

    browsing(work())


@pytest.mark.browser
def test_a_key_is_asked_for_and_kept_in_memory_only():
    async def work() -> None:
        async with served(**WITH_KEY) as gateway, page_of(gateway.url) as page:
            await page.fill("#key-value", "wrong")
            await page.keyboard.press("Enter")
            await page.get_by_text("Incorrect API key").wait_for()
            await page.fill("#key-value", KEY)
            await page.keyboard.press("Enter")
            await page.locator("#key").wait_for(state="hidden")
            await say(page)
            assert await page.locator(".text").text_content() == expected()
            kept = await page.evaluate(
                "() => JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
            )
            assert kept == '[{},{},""]'
            assert KEY not in await page.content()
            page.said.clear()  # the browser's own lines about the 401s

    browsing(work())


UNNAMED = """() => [...document.querySelectorAll(
    "button, input, select, textarea, [role=log], [role=group]")]
  .filter((e) => !e.labels?.length && !e.ariaLabel)
  .filter((e) => e.tagName !== "BUTTON" || !e.textContent.trim())
  .map((e) => e.outerHTML)"""
PALE = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const colour = rgb(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  let looked = 0;
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length) continue;
    if (e.matches(":disabled, option, script, noscript")) continue;
    looked += 1;
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) found.push([e.outerHTML.slice(0, 120), contrast]);
  }
  return [looked, found];
}"""


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_controls_have_names_and_text_has_contrast(scheme: str):
    async def work() -> None:
        async with served() as gateway, page_of(gateway.url, color_scheme=scheme) as page:
            await page.check("#compare")
            for field in ("#set-a", "#set-b"):
                rule = page.locator(field).get_by_label("Acceptance rule")
                await rule.select_option("relaxed")
            await page.locator("#set-a").get_by_label("Relaxed rule").select_option("fsd")
            await page.locator("#set-a").get_by_label("Threshold").fill("0.6")
            await page.locator("#set-a").get_by_label("Schedule").select_option("sync")
            await say(page, answers=2)
            await page.locator(".text .t").first.hover()
            assert await page.evaluate(UNNAMED) == []
            for theme in ("system", "light", "dark"):
                looked, pale = await page.evaluate(PALE)
                assert looked > 60
                assert pale == [], (scheme, theme)
                await page.click("#theme")

    browsing(work())


@pytest.mark.browser
def test_a_new_chat_in_mid_answer_forgets_that_answer():
    async def work() -> None:
        model = slow()
        async with served(model=model) as gateway, page_of(gateway.url) as page:
            await begin(page)
            await page.click("#new")
            await page.locator("#send").wait_for()
            await gateway.pair.idle()
            assert await page.locator("#welcome").is_visible()
            assert await page.locator(".turn").count() == 0
            model.before = lambda _: None
            sent = []
            page.on("request", lambda request: sent.append(request.post_data_json))
            await say(page)
            assert sent[0]["messages"] == HELLO
            assert await page.locator(".text").text_content() == expected()
            counts = await page.locator("#legend .count").all_text_contents()
            assert sum(map(int, counts)) == 24

    browsing(work())


@pytest.mark.browser
def test_what_is_no_number_is_said_and_never_taken_for_nothing():
    async def work() -> None:
        async with served() as gateway, page_of(gateway.url) as page:
            await page.fill("#temperature", "")
            await page.locator("#temperature").press_sequentially("1e")
            await page.fill("#message", "my question")
            await page.press("#message", "Enter")
            alert = page.locator("#alert")
            await alert.wait_for()
            assert "Temperature: not a number." in await alert.inner_text()
            assert await page.input_value("#message") == "my question"
            await page.fill("#temperature", "1")
            await say(page)
            saved = page.locator("#saved")
            await page.select_option("#unit", "forward")  # wants no measured step
            assert "Money: " in await saved.inner_text()
            for nonsense in ("-5", "1e300"):
                await page.fill("#price", nonsense)
                assert "Price: give a number" in await saved.inner_text()
                assert "Money" not in await saved.inner_text()
                assert await page.get_attribute("#price", "aria-invalid") == "true"
            await page.fill("#price", "2")
            assert "Money: " in await saved.inner_text()
            await page.fill("#watts-edge", "")
            await page.locator("#watts-edge").press_sequentially("-")
            assert "Edge, watts: give a number" in await saved.inner_text()

    browsing(work())


@pytest.mark.browser
def test_a_long_fast_answer_is_laid_out_by_the_frame_and_followed_to_its_end():
    says = b"word and more of it, " * 60
    start = len(TOKENIZER.chat(HELLO))
    law = scripted_law([*says], start=start, width=WIDTH, filler=ByteTokenizer.END)

    async def work() -> None:
        pair = {"model": toy(law), "draft": ModelDrafter("same", model=toy(law))}
        async with served(**pair) as gateway, page_of(gateway.url) as page:
            await page.set_viewport_size({"width": 800, "height": 500})
            await page.evaluate(COUNT_LAYOUTS)
            await say(page, **{"max-tokens": 2000, "temperature": 0})
            assert await page.locator(".t").count() >= len(says)
            assert await page.evaluate("() => window.layouts") < len(says) / 2
            below = "(log) => log.scrollHeight - log.scrollTop - log.clientHeight"
            assert await page.locator("#log").evaluate(below) < 5
            await page.locator("#log").evaluate("(log) => { log.scrollTop = 0 }")
            await page.get_by_role("button", name="Theme").click()  # a frame, and the event is in
            await page.evaluate("() => new Promise(requestAnimationFrame)")
            assert await page.locator("#log").evaluate("(log) => log.scrollTop") == 0

    browsing(work())


COUNT_LAYOUTS = """() => {
  window.layouts = 0;
  const own = Object.getOwnPropertyDescriptor(Element.prototype, "scrollHeight");
  Object.defineProperty(Element.prototype, "scrollHeight", {
    get() { window.layouts += 1; return own.get.call(this); },
  });
}"""


@pytest.mark.browser
def test_a_key_dialog_that_was_closed_comes_back_with_the_next_message():
    async def work() -> None:
        async with served(**WITH_KEY) as gateway, page_of(gateway.url) as page:
            dialog = page.locator("#key")
            await dialog.wait_for()
            await page.keyboard.press("Escape")
            await dialog.wait_for(state="hidden")
            await page.fill("#max-tokens", "24")
            await page.fill("#seed", "7")
            await page.fill("#temperature", "1")
            await page.fill("#message", "hi")
            await page.press("#message", "Enter")
            await page.fill("#key-value", KEY)
            await page.keyboard.press("Enter")
            await page.locator(".answer:not(.busy)").wait_for()  # it had waited for the key
            assert await page.locator(".text").text_content() == expected()
            page.said.clear()  # the browser's own lines about the 401s

    browsing(work())


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(scheme: str):
    """Deque's axe-core, by its own rules and best practices."""
    path = os.environ.get("OUTRIDER_AXE")
    if not path:
        pytest.skip("no axe-core: npm install axe-core, OUTRIDER_AXE=node_modules/axe-core/axe.js")

    async def work() -> None:
        async with served() as gateway, page_of(gateway.url, color_scheme=scheme) as page:
            await page.evaluate(await asyncio.to_thread(Path(path).read_text))

            async def look(where: str) -> None:
                found = await page.evaluate("async () => (await axe.run()).violations")
                assert [(v["id"], v["nodes"][0]["html"]) for v in found] == [], where

            await look("empty")
            await say(page)
            await page.locator(".text .t").first.hover()
            await look("answer")
            await page.check("#compare")
            await say(page, answers=2)
            await look("compared")
            await page.fill("#temperature", "1000")
            await page.fill("#message", "hi")
            await page.press("#message", "Enter")
            await page.locator("#alert").wait_for()
            await look("refused")
            await page.set_viewport_size({"width": 360, "height": 740})
            for view in ("chat", "live", "how"):
                await page.click(f"[data-go={view}]")
                await look(f"phone, {view}")
            page.said.clear()  # the browser's own line about the 400

    browsing(work())


@pytest.mark.browser
def test_a_phone_shows_all_of_it_without_scrolling_sideways():
    async def work() -> None:
        size = {"width": 360, "height": 740}
        async with served() as gateway, page_of(gateway.url, viewport=size) as page:
            await page.get_by_role("button", name="Settings").click()
            assert await page.locator("#message").is_hidden()
            await page.get_by_role("button", name="Chat", exact=True).click()
            await say(page, **{"max-tokens": 200})
            for view in ("chat", "live", "how"):
                await page.click(f"[data-go={view}]")
                width = await page.evaluate("() => document.documentElement.scrollWidth")
                assert width <= 360, view
                wide = await page.evaluate(
                    "() => [...document.querySelectorAll('main *')]"
                    ".filter((e) => e.getClientRects().length && !e.closest('.canvas')"
                    " && e.getBoundingClientRect().right > 361)"
                    ".map((e) => e.outerHTML.slice(0, 80))"
                )
                assert wide == [], view

    browsing(work())
