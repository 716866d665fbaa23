"""The page: what is above the tabs, the tabs, and the server."""

from __future__ import annotations

from pathlib import Path

import gradio as gr

from cachedit import __version__
from cachedit.app import calibrate, image, report, text, video
from cachedit.app.desk import Desk
from cachedit.app.request import Source
from cachedit.app.settings import Settings

TABS = (image, video, text, calibrate, report)
"""A tab is a module with TITLE, NAME and ``build(desk, source)``; another one is added here."""

FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}  # nothing is loaded
READABLE = {  # Gradio's own greys, and white on its orange, are too pale to read
    "button_primary_background_fill": "*primary_700",
    "button_primary_background_fill_hover": "*primary_800",
    "button_primary_background_fill_dark": "*primary_700",
    "block_info_text_color": "*neutral_600",
    "block_info_text_color_dark": "*neutral_300",
    "input_placeholder_color": "*neutral_500",
    "input_placeholder_color_dark": "*neutral_400",
}
WAITING = 64  # visitors whose runs may wait in the queue of the page
ANNOUNCE = "() => document.querySelectorAll('.ce-live').forEach(one => one.setAttribute('aria-live', 'polite'))"


def build(desk: Desk) -> gr.Blocks:
    """The page, not served yet."""
    settings = desk.settings

    def leave(request: gr.Request) -> None:
        desk.cancel(str(request.session_hash))

    with gr.Blocks(title="cachedit", analytics_enabled=False) as page:
        gr.Markdown("# cachedit\nDiffusion models several times faster by caching: see what it gains and costs.")
        with gr.Row():
            model = gr.Textbox(
                settings.model,
                label="Model",
                info="folder of a diffusers pipeline, for text of a language model, or hub id; empty: the sample",
                placeholder="the sample that comes with cachedit",
                max_lines=1,
                interactive=not settings.public,
                min_width=280,
                elem_id="model",
            )
            profile = gr.Textbox(
                "",
                label="Profile",
                info="file, name, or hub:org/name; empty: the one that is found for the model",
                placeholder="found for the model",
                max_lines=1,
                min_width=280,
                elem_id="profile",
            )
        with gr.Tabs():
            for tab in TABS:
                with gr.Tab(tab.TITLE, id=tab.NAME):
                    tab.build(desk, Source(model, profile))
        gr.Markdown(f"cachedit {__version__}", elem_classes="ce-foot")
        page.load(None, js=ANNOUNCE, api_visibility="private")
        page.unload(leave)
    return page


def serve(settings: Settings, port: int | None = None) -> None:
    """Serve the page until the process is interrupted.

    Args:
        settings: of the app.
        port: where it listens; None: the first free one from 7860.

    Raises:
        ValueError: it cannot listen there.
    """
    page = build(Desk(settings))
    page.queue(max_size=WAITING)
    try:
        local, public = _launched(page, settings, port)
    except OSError as error:
        asked = f"port {port}" if port else "the ports from 7860 on"
        raise ValueError(
            f"cannot listen at {settings.host}, {asked}, in use or not allowed. Choose: --port N, --host ADDRESS"
        ) from error
    print(f"cachedit app: {local}" + (f" and, for everybody, {public}" if public else "") + " (Ctrl-C ends it)")
    page.block_thread()


def _launched(page: gr.Blocks, settings: Settings, port: int | None) -> tuple[str, str | None]:
    """Start the server; its address, and that of the public link."""
    _, local, public = page.launch(
        server_name=settings.host,
        server_port=port,
        share=settings.share,
        theme=gr.themes.Default(primary_hue="teal", **FONTS).set(**READABLE),
        css_paths=Path(__file__).with_name("style.css"),
        footer_links=[],
        ssr_mode=False,
        pwa=False,
        quiet=True,
        prevent_thread_lock=True,
        # Else Gradio looks at its own page first, and on a busy machine, or behind a proxy, refuses to serve it.
        _frontend=False,
    )
    return local, public or None
