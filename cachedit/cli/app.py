"""``cachedit app``: the page in the browser."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from pathlib import Path

from cachedit.cli.parser import Parser, positive, set_threads


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Describe the command to the parser."""
    text = "a page in the browser: try caches, calibrate, build reports"
    parser = commands.add_parser("app", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument("--model", metavar="PATH_OR_ID", help="diffusers pipeline (default: the sample of cachedit)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=positive, help="default: the first free one from 7860")
    parser.add_argument(
        "--share", action="store_true", help="a public link through Gradio's servers; visitors get --model alone"
    )
    parser.add_argument(
        "--out", default="cachedit-app", metavar="DIR", help="everything is written there (default: %(default)s)"
    )
    parser.add_argument(
        "--keep", type=positive, default=2, metavar="N", help="most pipelines kept in memory (default: %(default)s)"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="let code run that lies beside the weights of a hub model"
    )
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a cpu, else bfloat16"
    )
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="CPU threads (default: 1 for the sample, else torch's)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the arguments are those that ``add`` describes."""
    if find_spec("gradio") is None:
        raise ValueError("the app needs gradio, which is not installed. Install it: pip install 'cachedit[app]'")
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    # Gradio reads both when it is imported: it asks the network for nothing, and keeps its copies of files with ours.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["GRADIO_TEMP_DIR"] = str((folder / "served").resolve())
    from cachedit.app.page import serve
    from cachedit.app.settings import Settings

    set_threads(arguments.threads, small=arguments.model is None)
    settings = Settings(
        model=arguments.model or "",
        folder=folder,
        host=arguments.host,
        share=arguments.share,
        kept=arguments.keep,
        device=arguments.device,
        dtype=arguments.dtype,
        trust_remote_code=arguments.trust_remote_code,
    )
    serve(settings, arguments.port)
    return 0
