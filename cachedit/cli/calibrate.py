"""``cachedit calibrate``: a model measured once, and the profile of it."""

from __future__ import annotations

import argparse

from cachedit.cli.parser import Parser, add_inputs, positive, set_threads


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Describe the command to the parser."""
    text = "measure a model once and store the profile that strategies read"
    parser = commands.add_parser("calibrate", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("model", nargs="?", metavar="MODEL", help="diffusers pipeline: a folder or a hub id")
    model.add_argument("--sample", metavar="NAME", help='calibrate a sample of cachedit instead ("image")')
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the profile to write")
    parser.add_argument("--name", help="to ask for the profile by (default: the sample's name, else none)")
    parser.add_argument("--strategy", default="magcache", metavar="NAME", help="default: %(default)s")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="recommended option to store; repeatable"
    )
    parser.add_argument("--steps", type=positive, default=50, help="inference steps (default: %(default)s)")
    add_inputs(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the arguments are those that ``add`` describes."""
    from cachedit import strategies  # noqa: F401  (fills the registry)
    from cachedit.calibration import calibrate
    from cachedit.evaluate.demo import call_options, parse_options
    from cachedit.evaluate.loading import load_pipeline, load_prompts
    from cachedit.evaluate.progress import progress_bar
    from cachedit.evaluate.writing import check_target
    from cachedit.samples import sample_path
    from cachedit.strategy import Strategy

    strategy = Strategy.find(arguments.strategy, parse_options(arguments.option))
    check_target(arguments.output, "-o")
    set_threads(arguments.threads, small=arguments.sample is not None)
    prompts = load_prompts(arguments.prompts, arguments.prompt, arguments.num_prompts)
    model = str(sample_path(arguments.sample)) if arguments.sample else arguments.model
    pipe = load_pipeline(model, arguments.device, arguments.dtype)
    with progress_bar() as progress:
        profile = calibrate(
            pipe,
            strategy,
            prompts=prompts,
            num_inference_steps=arguments.steps,
            seed=arguments.seed,
            progress=progress,
            call_options=call_options(arguments),
            name=arguments.name or arguments.sample or "",
            command=arguments.command,
            checkpoint=f"{arguments.output}.training",
        )
    profile.save(arguments.output)
    sizes = {name: len(next(iter(rows.values()))) for name, rows in profile.arrays.items()}
    arrays = ", ".join(f"{name} ({size} {profile.axes.get(name, ['step'])[0]}s)" for name, size in sizes.items())
    print(f"profile: {arguments.output}")
    print(f"  model:    {profile.model['class'] if profile.model else 'any'}")
    print(f"  arrays:   {arrays}")
    print(f"  branches: {', '.join(profile.branches)}")
    print(f"  from:     {len(prompts)} prompts x {arguments.steps} steps, seed {arguments.seed}")
    print(f'  use it:   cachedit.wrap(pipe, "{arguments.strategy}", profile="{arguments.output}")')
    return 0
