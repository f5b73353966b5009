"""The page in a real browser: live data that grows, an empty run, a dead service, a dead dashboard; always offline.

With PACELINE_SCREENSHOTS set to a folder, each view is left there as a picture to look at.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import redis.asyncio
from dashboard_fake_run import RUN, FakeRun, Spans, dashboard, evaluation_record, fake_run, step_record
from playwright.async_api import Browser, Page, async_playwright, expect

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.ledger import Ledger
from paceline.rpc.status import timestamp
from paceline.telemetry import names
from paceline.testing.processes import ServiceProcess

Theme = Literal["light", "dark"]
_CHROMIUM = "/usr/bin/chromium"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not Path(_CHROMIUM).exists(), reason=f"needs {_CHROMIUM}: apt-get install chromium"),
]
_FLAGS = [
    "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
]  # fmt: skip
_SECONDS = 20_000
expect.set_options(timeout=_SECONDS)


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=_CHROMIUM, chromium_sandbox=False, args=_FLAGS)
        yield opened
        await opened.close()


@dataclass
class Watched:
    """A page with what it should never have."""

    page: Page
    foreign: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    async def shot(self, name: str) -> None:
        if folder := os.environ.get("PACELINE_SCREENSHOTS"):
            await self.page.evaluate("scrollTo(0, 0)")
            await self.page.screenshot(path=f"{folder}/{name}.png", full_page=True)

    async def points(self, chart: str) -> int:
        return int(await self.page.locator(f"#chart-{chart} figure").get_attribute("data-points") or 0)


@asynccontextmanager
async def visit(
    browser: Browser,
    process: ServiceProcess,
    theme: Theme = "light",
    width: int = 1440,
    query: str = "",
) -> AsyncIterator[Watched]:
    """The page of a dashboard; at the end it must have asked no one else and complained of nothing."""
    address = process.labels["http_address"]
    context = await browser.new_context(color_scheme=theme, viewport={"width": width, "height": 1000})
    watched = Watched(await context.new_page())
    page = watched.page
    page.on("request", lambda request: address in request.url or watched.foreign.append(request.url))
    page.on("console", lambda message: message.type == "error" and watched.complaints.append(message.text))
    page.on("pageerror", lambda error: watched.complaints.append(str(error)))
    await page.goto(f"http://{address}/{query}")
    try:
        yield watched
    finally:
        print("the page complained of:", watched.complaints)
    assert watched.foreign == []
    assert watched.complaints == []
    await context.close()


def free_port() -> int:
    """A port for a process that must come back on the same one."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


async def train(run: FakeRun, first: int, last: int) -> None:
    for step in range(first, last + 1):
        record = step_record(step)
        record.time.CopyFrom(timestamp(time.time() - 4.3 * (last - step)))
        await run.coordinator.record(record)
        if step % 10 == 0:
            await run.coordinator.record(evaluation_record(step))
    run.coordinator.version = last + 1
    noise = random.Random(last)
    for name, member in run.members.items():
        if member.engine is not None:
            member.engine.version = last + 1 if name != "engine-2" else last - 1
            member.engine.running, member.engine.waiting = noise.randint(20, 90), noise.randint(0, 6)
            member.engine.rate = noise.uniform(700, 900)


async def fill_ledger(client: redis.asyncio.Redis) -> None:
    ledger = Ledger(client, RUN)
    await ledger.initialise(5000, 1)
    issued = await ledger.issue("rollout-0", 300, 600, None)
    for item in issued[:14]:
        await ledger.drop(item.group_id, item.attempt, "zero_variance")
    for item in issued[14:17]:
        await ledger.drop(item.group_id, item.attempt, "prompt_too_long")


async def test_a_live_run_fills_the_page_and_grows(
    tmp_path: Path, redis_url: str, redis_client: redis.asyncio.Redis, browser: Browser
) -> None:
    await fill_ledger(redis_client)
    async with fake_run() as run:
        await run.add_usual()
        await train(run, 1, 34)
        async with dashboard(run, tmp_path, redis_url) as process, visit(browser, process) as watched:
            page = watched.page
            await expect(page.locator("#run-name")).to_have_text(RUN)
            await expect(page.locator("#run-state")).to_have_text("active")
            await expect(page.locator("#fact-step")).to_have_text("34 of 100")
            await expect(page.locator("#fact-eta")).to_contain_text("about")
            await expect(page.locator("#verdict-text")).to_contain_text("Rollout-bound: the trainer idled")
            await expect(page.locator("#engines")).to_contain_text("2 behind")
            await expect(page.locator("#waits li").first).to_contain_text("waits for 8 groups of step 35")
            await expect(page.locator("#ledger")).to_contain_text("issued 300 = trained 0 + dropped 17")
            await expect(page.locator("#ledger")).to_contain_text("zero variance")
            await expect(page.locator("#alarm-list")).to_contain_text("engine-2 lags")
            assert await watched.points("reward") == 34
            assert await watched.points("loss") == 34
            shown = page.locator("#chart-reward .legend b").first
            before = await shown.text_content()
            await train(run, 35, 36)
            await expect(page.locator("#chart-reward figure")).to_have_attribute("data-points", "36")
            await expect(page.locator("#fact-step")).to_have_text("36 of 100")
            assert await shown.text_content() != before
            canvas = page.locator("#chart-reward canvas").first
            assert await canvas.evaluate("it => it.width") > 0
            # A step that is replayed replaces its point.
            await run.coordinator.record(step_record(36, **{names.REWARD_MEAN: 0.123}))
            await expect(shown).to_contain_text("0.123")
            assert await watched.points("reward") == 36


async def test_a_group_is_followed_from_prompt_to_gradient(tmp_path: Path, redis_url: str, browser: Browser) -> None:
    async with fake_run() as run:
        await run.add_usual()
        await train(run, 1, 3)
        async with dashboard(run, tmp_path, redis_url) as process, visit(browser, process) as watched:
            spans = Spans(process.address)
            for number in range(6):
                spans.group(f"e0.{number}", time.time() - 6 + number / 10, step=4, failed=number == 2)
            await asyncio.to_thread(spans.flush)
            page = watched.page
            await page.get_by_role("button", name="e0.2", exact=True).click()
            await expect(page.locator("#group h3")).to_have_text("Group e0.2")
            await expect(page.locator(".strip li")).to_have_count(6)
            await expect(page.locator(".strip")).to_contain_text("generate")
            await expect(page.locator(".waterfall li").first).to_contain_text("rollout.group")
            await expect(page.locator('.waterfall li[data-error="true"]')).to_contain_text("grader took longer")
            await expect(page.locator(".waterfall li").last).to_contain_text("trainer.train_group")
            await watched.shot("group")
            # The address is a permalink.
            await page.reload()
            await expect(page.locator("#group h3")).to_have_text("Group e0.2")
            # By keyboard, and a group that nobody knows.
            await page.get_by_label("Find group").fill("e0.4")
            await page.keyboard.press("Enter")
            await expect(page.locator("#group h3")).to_have_text("Group e0.4")
            await asyncio.to_thread(spans.close)


@pytest.mark.parametrize(("theme", "width"), [("light", 1440), ("dark", 1440), ("light", 390)])
async def test_every_view_fits_its_width(
    tmp_path: Path, redis_url: str, redis_client: redis.asyncio.Redis, browser: Browser, theme: Theme, width: int
) -> None:
    await fill_ledger(redis_client)
    async with fake_run() as run:
        await run.add_usual()
        await train(run, 1, 34)
        async with dashboard(run, tmp_path, redis_url) as process:
            spans = Spans(process.address)
            for number in range(14):
                spans.group(f"e0.{number}", time.time() - 6 - number, step=34, failed=number == 3)
            await asyncio.to_thread(spans.close)
            async with visit(browser, process, theme, width, "?group=e0.3") as watched:
                await expect(watched.page.locator("#group h3")).to_have_text("Group e0.3")
                await expect(watched.page.locator("#engines")).to_contain_text("2 behind")
                wide = await watched.page.evaluate("document.documentElement.scrollWidth")
                assert wide <= width, "nothing sticks out"
                await watched.shot(theme if width > 800 else "narrow")


async def test_an_empty_run_says_what_it_waits_for(tmp_path: Path, redis_url: str, browser: Browser) -> None:
    async with fake_run() as run, dashboard(run, tmp_path, redis_url) as process:
        async with visit(browser, process) as watched:
            page = watched.page
            await expect(page.locator("#empty-text")).to_contain_text(
                "trainer, rollout, engine, router, reward to join"
            )
            await expect(page.locator("#curves")).to_be_hidden()
            await expect(page.locator("#verdict")).to_be_hidden()
            await watched.shot("empty")
            await run.add_usual()
            await expect(page.locator("#empty-text")).to_contain_text("trainer-0 waits for 8 groups")
            await watched.shot("empty-ready")
            await train(run, 1, 1)
            await expect(page.locator("#curves")).to_be_visible()
            await expect(page.locator("#empty")).to_be_hidden()
            await expect(page.locator("#fact-step")).to_have_text("1 of 100")


async def test_a_finished_run_is_calm_and_shows_what_it_measured(
    tmp_path: Path, redis_url: str, redis_client: redis.asyncio.Redis, browser: Browser
) -> None:
    await fill_ledger(redis_client)
    async with fake_run() as run:
        await run.add_usual()
        for step in range(1, 7):
            record = step_record(step, **{names.REWARD_MEAN: 0.9, names.REWARD_STD: 0.3})
            del record.values[names.KL_REFERENCE]
            await run.coordinator.record(record)
        async with dashboard(run, tmp_path, redis_url) as process, visit(browser, process) as watched:
            page = watched.page
            await expect(page.locator("#chart-reward figure")).to_have_attribute("data-points", "6")
            await expect(page.locator("#chart-kl")).to_be_hidden()
            await expect(page.locator("#chart-loss")).to_be_visible()
            low, high = map(
                float, (await page.locator("#chart-reward figure").get_attribute("data-range") or "").split()
            )
            assert 0.5 < low < 0.6 and 1.0 <= high < 1.05, "rewards from 0 to 1: the spread is not drawn beyond"
            await run.coordinator.finish(pb.RUN_STATE_FINISHED, "trained 6 steps")
            await run.vanish("trainer-0")
            del run.coordinator.members["trainer-0"]
            trainer = page.locator("#others li", has_text="trainer-0")
            await expect(trainer).to_contain_text("ended with the run")
            await expect(trainer.locator(".health")).to_have_attribute("data-health", "ended")
            grey = "getComputedStyle(document.querySelector('#others .health[data-health=ended]')).color"
            quiet = "getComputedStyle(document.querySelector('#foot')).color"
            assert await page.evaluate(grey) == await page.evaluate(quiet), "as quiet as the small print"
            await expect(page.locator("#run-state")).to_have_text("finished")
            await expect(page.locator("#waits")).to_contain_text("nobody waits for anybody")
            await expect(page.locator("#alarm-list")).to_contain_text("Nothing needs your attention")
            await expect(page.locator("#sources")).to_be_hidden()
            await watched.shot("finished")


async def test_a_run_without_rewards_says_so(tmp_path: Path, redis_url: str, browser: Browser) -> None:
    async with fake_run() as run:
        await run.add_usual()
        for step in range(1, 4):
            record = step_record(step, **{names.REWARD_MISSING: 64.0, names.SAMPLES_TRAINED: 0.0})
            for name in (names.REWARD_MEAN, names.REWARD_STD):
                del record.values[name]
            await run.coordinator.record(record)
        await run.coordinator.finish(pb.RUN_STATE_FAILED, "not one of the 192 trajectories had a reward")
        async with dashboard(run, tmp_path, redis_url) as process, visit(browser, process) as watched:
            page = watched.page
            await expect(page.locator("#run-state")).to_have_text("failed")
            await expect(page.locator("#run-about")).to_contain_text("not one of the 192 trajectories had a reward")
            await expect(page.locator("#alarm-list")).to_contain_text("Not one of the 192 trajectories")
            await expect(page.locator("#chart-reward .plot")).to_have_attribute(
                "data-empty", "no trajectory has had a reward"
            )
            await watched.shot("no-rewards")


async def test_a_dead_service_is_shown_as_dead(tmp_path: Path, redis_url: str, browser: Browser) -> None:
    async with fake_run() as run:
        await run.add_usual()
        await train(run, 1, 8)
        async with dashboard(run, tmp_path, redis_url) as process, visit(browser, process) as watched:
            page = watched.page
            row = page.locator("#engines tr", has_text="engine-1")
            await expect(row).to_contain_text("ready")
            await run.vanish("engine-1")
            await run.stop_coordinator()
            await expect(row).to_contain_text("silent for")
            await expect(page.locator("#alarm-list")).to_contain_text("engine-1 does not answer")
            await expect(page.locator("#sources")).to_contain_text("The steps from the coordinator")
            await expect(page.locator("#alarm-count")).to_have_attribute("data-level", "critical")
            await watched.shot("dead")
            await run.start_coordinator()
            await expect(page.locator("#sources")).not_to_contain_text("The steps from the coordinator")


async def test_a_dashboard_that_dies_is_noticed_and_taken_up_again(
    tmp_path: Path, redis_url: str, browser: Browser
) -> None:
    port = f"127.0.0.1:{free_port()}"
    async with fake_run() as run, dashboard(run, tmp_path, redis_url, listen=port) as process:
        await train(run, 1, 3)
        context = await browser.new_context()
        page = await context.new_page()
        await page.goto(f"http://{port}/")
        await expect(page.locator("#link")).to_have_text("live")
        await process.kill()
        await expect(page.locator("#link")).to_contain_text("no answer for")
        await train(run, 4, 5)
        await process.start()
        await expect(page.locator("#link")).to_have_text("live")
        await expect(page.locator("#chart-reward figure")).to_have_attribute("data-points", "5")
        await context.close()


async def test_the_page_works_by_keyboard_and_in_both_themes(tmp_path: Path, redis_url: str, browser: Browser) -> None:
    async with fake_run() as run:
        await train(run, 1, 12)
        async with dashboard(run, tmp_path, redis_url) as process, visit(browser, process) as watched:
            page = watched.page
            await expect(page.locator("#chart-reward figure")).to_have_attribute("data-points", "12")
            await page.locator("#chart-reward figure").focus()
            await page.keyboard.press("Home")
            await expect(page.locator("#chart-reward .at")).to_have_text("step 1")
            await page.keyboard.press("ArrowRight")
            await expect(page.locator("#chart-reward .at")).to_have_text("step 2")
            # One cursor for all charts: the same step is read everywhere.
            await expect(page.locator("#chart-seconds .at")).to_have_text("step 2")
            colour = "getComputedStyle(document.body).backgroundColor"
            light = await page.evaluate(colour)
            toggle = page.locator("#theme")
            await toggle.press("Enter")
            await toggle.press("Enter")
            await expect(toggle).to_have_text("Theme: dark")
            assert await page.evaluate(colour) != light
            unnamed = await page.evaluate(
                """[...document.querySelectorAll("button, input, a, [role=img], [role=region], figure")]
                .filter((it) => !(it.textContent.trim() || it.ariaLabel || it.labels?.length))
                .map((it) => it.outerHTML)"""
            )
            assert unnamed == []
