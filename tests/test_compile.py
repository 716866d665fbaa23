"""torch.compile: any order of compiling and wrapping gives eager results from two graphs, one per kind of step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch._dynamo
from conftest import Scripted
from torch import nn
from torch._dynamo.utils import counters

import cachedit
from cachedit import Context, FeatureStrategy
from zoo.models import CASES, Case
from zoo.pipelines import PIPELINES, run

STEPS = 8
SIGMAS = [1 - step / STEPS for step in range(STEPS)]
# Ratios of one never reach the threshold: steps 0 and 1 are warm-up (8 * 0.2, rounded), then 2 of 3 are reused.
FLAT = cachedit.Profile.from_ratios([1.0] * STEPS)
STRIP = "■■□□■□□■"
GRAPHS = [1, 1, *[2] * 14]  # number of graphs after every step of two runs: the third step is the first reused one


@dataclass(frozen=True)
class Extrapolate(FeatureStrategy, abstract=True):
    """Compute two steps, then forecast along the line through them: other weights at every step."""

    history: ClassVar[int] = 2

    def should_compute(self, ctx: Context) -> bool:
        return ctx.step < 2

    def weights(self, ctx: Context) -> tuple[float, ...]:
        gap = float(ctx.step - ctx.computed_steps[-1])
        return (-gap, 1 + gap)


class Graphs:
    """A compile backend that runs every graph as it is and notes the number of its operations."""

    def __init__(self) -> None:
        self.operations: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.operations.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    def __len__(self) -> int:
        return len(self.operations)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def breaks() -> list[str]:
    """Reasons of all graph breaks since the test began."""
    return list(counters["graph_break"].elements())


def timesteps(case: Case) -> list[float]:
    return [float(next(iter(case.time(sigma, 1).values())).max()) for sigma in SIGMAS]


def wrap(module: nn.Module, case: Case) -> nn.Module:
    return cachedit.wrap(
        module, "magcache", profile=FLAT, max_skip_steps=2, timesteps=timesteps(case), few_step_guard=False
    )


def drive(case: Case, module: nn.Module, graphs: Graphs | None = None, runs: int = 2, **extra: Any) -> list[Any]:
    """Outputs of ``runs`` runs on random inputs, or with ``graphs`` (outputs, number of graphs after every step)."""
    outputs, counts = [], []
    for seed in range(runs * STEPS):
        outputs.append(case.call(module, SIGMAS[seed % STEPS], seed=seed, **extra))
        counts.append(0 if graphs is None else len(graphs))
    return outputs if graphs is None else [outputs, counts]


def assert_equal(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def eager() -> Callable[[str], tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Name of a case -> outputs of its plain and of its wrapped model, without torch.compile."""
    known: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def outputs(name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if name not in known:
            case = CASES[name]
            known[name] = drive(case, case.build()), drive(case, wrap(case.build(), case))
            # a step that is not reused would make every comparison of this file empty
            assert not torch.allclose(known[name][0][2], known[name][1][2], atol=1e-3)
        return known[name]

    return outputs


Way = Callable[[nn.Module, Case, Any], tuple[nn.Module, nn.Module]]  # -> (what is called, what was wrapped)


def compile_then_wrap(model: nn.Module, case: Case, backend: Any) -> tuple[nn.Module, nn.Module]:
    compiled = torch.compile(model, backend=backend)
    return compiled, wrap(compiled, case)


def compile_run_then_wrap(model: nn.Module, case: Case, backend: Any) -> tuple[nn.Module, nn.Module]:
    compiled = torch.compile(model, backend=backend)
    case.call(compiled)
    return compiled, wrap(compiled, case)


def wrap_then_compile(model: nn.Module, case: Case, backend: Any) -> tuple[nn.Module, nn.Module]:
    return torch.compile(wrap(model, case), backend=backend), model


def in_place_then_wrap(model: nn.Module, case: Case, backend: Any) -> tuple[nn.Module, nn.Module]:
    model.compile(backend=backend)
    return model, wrap(model, case)


def in_place_run_then_wrap(model: nn.Module, case: Case, backend: Any) -> tuple[nn.Module, nn.Module]:
    model.compile(backend=backend)
    case.call(model)
    return model, wrap(model, case)


def wrap_then_in_place(model: nn.Module, case: Case, backend: Any) -> tuple[nn.Module, nn.Module]:
    wrap(model, case).compile(backend=backend)
    return model, model


WAYS: list[Way] = [
    compile_then_wrap,
    compile_run_then_wrap,
    wrap_then_compile,
    in_place_then_wrap,
    in_place_run_then_wrap,
    wrap_then_in_place,
]


def assert_as_eager(
    case: Case, way: Way, graphs: Graphs, plain: list[torch.Tensor], cached: list[torch.Tensor]
) -> None:
    """Drive the model compiled and wrapped in this ``way``: eager results, two new graphs or none."""
    called, wrapped = way(case.build(), case, graphs)
    before = len(graphs)  # the graph of the plain model, where it has already run
    outputs, counts = drive(case, called, graphs)
    assert_equal(outputs, cached)
    assert cachedit.last_run(wrapped).strip() == STRIP  # type: ignore[union-attr]
    assert [count - before for count in counts] in (GRAPHS, [0] * len(GRAPHS))
    cachedit.unwrap(wrapped)
    assert_equal([case.call(called, sigma, seed=step) for step, sigma in enumerate(SIGMAS[:4])], plain[:4])
    assert len(set(breaks())) <= 1, breaks()  # none where hooks run outside traced code, else the clock


@pytest.mark.parametrize(
    "way", [compile_run_then_wrap, wrap_then_compile, wrap_then_in_place], ids=lambda way: way.__name__
)
def test_a_compiled_model_takes_two_graphs_and_gives_eager_results(way: Way, eager: Any) -> None:
    graphs = Graphs()
    assert_as_eager(CASES["flux"], way, graphs, *eager("flux"))
    reused, plain, computed = sorted(graphs.operations)
    assert reused < plain / 2  # no block is in it
    assert plain < computed < plain + 30  # watching costs a few subtractions


@pytest.mark.parametrize("name", ["wan", "dit"])
def test_every_way_of_compiling_shares_three_graphs(name: str, eager: Any) -> None:
    graphs = Graphs()
    for way in WAYS:
        assert_as_eager(CASES[name], way, graphs, *eager(name))
    assert len(graphs) == 3  # plain, computed, reused


@pytest.mark.parametrize("order", ["compile first", "wrap first"])
@pytest.mark.parametrize("name", ["flux", "wan"])  # diffusers names no repeated blocks for DiT
def test_compiled_blocks_stay_the_graphs_of_the_plain_model(name: str, order: str, eager: Any) -> None:
    case, graphs = CASES[name], Graphs()
    plain, cached = eager(name)
    model = case.build()
    if order == "wrap first":
        wrap(model, case)
    model.compile_repeated_blocks(backend=graphs, fullgraph=True)
    if order == "compile first":
        case.call(model)
        wrap(model, case)

    outputs, counts = drive(case, model, graphs)

    assert_equal(outputs, cached)
    assert set(counts) == {counts[0]}  # all blocks are compiled in the first step
    assert not breaks()
    assert cachedit.last_run(model).strip() == STRIP  # type: ignore[union-attr]
    cachedit.unwrap(model)
    assert_equal(drive(case, model, runs=1), plain[:STEPS])
    assert len(graphs) == counts[0]  # the plain model runs the same graphs


def test_fullgraph_accepts_a_wrapped_model(eager: Any) -> None:
    case, graphs = CASES["wan"], Graphs()
    outputs, counts = drive(case, torch.compile(wrap(case.build(), case), backend=graphs, fullgraph=True), graphs)
    assert counts == GRAPHS
    assert_equal(outputs, eager("wan")[1])


def test_a_compiled_function_around_the_model_breaks_once(eager: Any) -> None:
    # Here the hooks of the model are traced too, and only the clock must stay outside.
    case, graphs = CASES["flux"], Graphs()
    model = wrap(case.build(), case)

    @torch.compile(backend=graphs)
    def step(**kwargs: Any) -> Any:
        return model(**kwargs)

    outputs, counts = drive(case, step, graphs)  # type: ignore[arg-type]

    assert_equal(outputs, eager("flux")[1])
    assert [count - counts[0] + 1 for count in counts] == GRAPHS
    (reason,) = set(breaks())  # one place, though dynamo counts it again when it leaves the function around it
    assert "Runner." in reason
    assert cachedit.last_run(model).strip() == STRIP  # type: ignore[union-attr]


@pytest.mark.parametrize("order", ["compile first", "wrap first"])
def test_a_pipeline_with_compiled_experts(order: str) -> None:
    options: dict[str, Any] = {"profile": cachedit.Profile.from_ratios([1.0] * 10), "max_skip_steps": 2}
    reference = PIPELINES["wan22"]()
    plain = run(reference)
    cachedit.wrap(reference.pipe, "magcache", **options)
    wanted, strip = [run(reference, seed) for seed in (0, 1)], cachedit.last_run(reference.pipe).strip()  # type: ignore[union-attr]
    built, graphs = PIPELINES["wan22"](), Graphs()
    if order == "wrap first":
        cachedit.wrap(built.pipe, "magcache", **options)
    for denoiser in built.denoisers:
        setattr(built.pipe, denoiser, torch.compile(getattr(built.pipe, denoiser), backend=graphs))
    if order == "compile first":
        cachedit.wrap(built.pipe, "magcache", **options)

    got = [run(built, seed) for seed in (0, 1)]

    assert_equal(got, wanted)
    assert len(graphs) == 2  # branches and experts share them
    assert cachedit.last_run(built.pipe).strip() == strip  # type: ignore[union-attr]
    assert "□" in strip
    cachedit.unwrap(built.pipe)
    assert_equal([run(built)], [plain])


def test_wrapping_again_compiles_nothing_new() -> None:
    # Else the ninth wrap would hit dynamo's recompile limit, and the model would silently run eagerly.
    case, graphs = CASES["wan"], Graphs()
    compiled = torch.compile(case.build(), backend=graphs)
    drive(case, wrap(compiled, case), runs=1)
    case.call(cachedit.unwrap(compiled))
    assert len(graphs) == 3  # computed, reused, plain
    for _ in range(3):
        drive(case, wrap(compiled, case), runs=1)
        case.call(cachedit.unwrap(compiled))
    assert len(graphs) == 3


def test_a_control_input_that_comes_and_goes_under_compile() -> None:
    case, control = CASES["flux"], CASES["flux"].control
    assert control is not None
    graphs, models = Graphs(), [wrap(case.build(), case), wrap(case.build(), case)]
    models.append(torch.compile(models.pop(), backend=graphs))  # type: ignore[arg-type]

    def sample(model: nn.Module) -> list[torch.Tensor]:
        given = [control(step, 1) if 3 <= step < 6 else {} for step in range(STEPS)]
        return [case.call(model, SIGMAS[k], seed=k, **given[k]) for k in range(STEPS)]

    wanted, got = [sample(model) for model in models]
    assert_equal(got, wanted)
    assert cachedit.last_run(models[0]).strip() == "■■□■□□■□"  # type: ignore[union-attr]
    assert len(graphs) == 4  # computed and reused, with and without control


def test_a_new_batch_size_under_compile() -> None:
    case, graphs = CASES["dit"], Graphs()
    reference, model = [wrap(case.build(), case) for _ in range(2)]
    compiled = torch.compile(model, backend=graphs, dynamic=False)
    for batch in (1, 2):
        assert_equal(drive(case, compiled, runs=1, batch=batch), drive(case, reference, runs=1, batch=batch))
    assert len(graphs) == 4  # a computed and a reused one for each shape


def test_weights_that_change_at_every_step_are_not_compiled_into_the_graph() -> None:
    # One graph per weight vector would hit dynamo's recompile limit (8), after which all steps run eagerly.
    case, graphs = CASES["flux"], Graphs()
    options: dict[str, Any] = {"timesteps": timesteps(case), "few_step_guard": False}
    reference = cachedit.wrap(case.build(), Extrapolate(), **options)
    compiled = torch.compile(cachedit.wrap(case.build(), Extrapolate(), **options), backend=graphs)
    outputs, counts = drive(case, compiled, graphs)
    assert_equal(outputs, drive(case, reference))
    assert counts == GRAPHS


def test_a_module_and_its_compiled_form_are_one_target() -> None:
    case = CASES["wan"]
    model = wrap(case.build(), case)
    compiled = torch.compile(model, backend=Graphs())
    drive(case, compiled, runs=1)
    assert cachedit.last_run(model) is not None
    assert (cachedit.last_run(compiled) is cachedit.last_run(model)) is True  # a plain "is" would print both models
    cachedit.unwrap(compiled)
    assert not model._forward_pre_hooks
    assert type(model.blocks) is nn.ModuleList


@pytest.mark.parametrize("first", ["module", "compiled"])
def test_wrapping_the_compiled_form_of_a_wrapped_module_replaces(first: str, eager: Any) -> None:
    case = CASES["wan"]
    model = case.build()
    compiled = torch.compile(model, backend=Graphs())
    forms = [model, compiled] if first == "module" else [compiled, model]
    for form in forms:
        wrap(form, case)
    assert_equal(drive(case, forms[-1]), eager("wan")[1])
    cachedit.unwrap(forms[-1])
    assert type(model.blocks) is nn.ModuleList
    assert not model._forward_pre_hooks
    assert not compiled._forward_pre_hooks
    assert_equal(drive(case, compiled, runs=1), eager("wan")[0][:STEPS])


def test_inductor() -> None:
    case = CASES["plain"]  # generating code for a diffusers model takes half a minute
    reference, model = [
        cachedit.wrap(case.build(), Scripted((0, 1, 4, 7)), blocks=case.stack, few_step_guard=False) for _ in range(2)
    ]
    for got, wanted in zip(drive(case, torch.compile(model)), drive(case, reference), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert cachedit.last_run(model).strip() == STRIP  # type: ignore[union-attr]
