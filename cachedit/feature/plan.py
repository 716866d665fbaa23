"""What the strategy is asked about one denoiser, and what follows from its answers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cachedit.feature.clock import Clock
from cachedit.feature.kept import Kept
from cachedit.feature.network import Network, Reused
from cachedit.feature.place import Forecast
from cachedit.feature.signals import Listener
from cachedit.profile import Profile
from cachedit.run import Step
from cachedit.strategy import Context, FeatureStrategy, Site

if TYPE_CHECKING:
    from cachedit.feature.session import Session


class Plan:
    """Which places of a denoiser a step reuses, and with what.

    Attributes:
        listener: hears the strategy's signal; None for a static schedule.
        chooses: True if the strategy chooses between its sites.
        simple: True if every place is reused at every step that is not computed, by all branches.
        computed: steps of this run at which the denoiser was computed, all branches together.
        first_step: first step of this run at which it was called.
        partial: True in a call of a step of which something is reused, by this branch or by another.
    """

    computed: list[int]
    first_step: int
    _context: Context | None
    _chosen: tuple[int, list[Reused]]

    def __init__(self, network: Network, kept: Kept, session: Session, expert: str) -> None:
        self.network, self.kept, self.session, self.expert = network, kept, session, expert
        strategy = session.strategy
        self.listener: Listener | None = None
        if strategy.signal:
            self.listener = Listener(strategy)
        self.chooses = type(strategy).reuses is not FeatureStrategy.reuses
        self.simple = not self.chooses and self.listener is None and not network.ends
        self.forget()

    def forget(self) -> None:
        """Drop everything that belongs to a run."""
        self.computed, self.first_step = [], -1
        self._context, self._chosen, self.partial = None, (-1, []), False
        self._last_reused: list[Site] = []
        if self.listener is not None:
            self.listener.forget()

    def context(self, clock: Clock, profile: Profile | None) -> Context:
        """What the strategy may look at: one object per run, moved along."""
        context = self._context
        if context is None:
            start, steps = self.session.expert_span(self)
            context = self._context = Context(
                schedule=clock.schedule,
                run_start=self.session.run_start,
                computed_steps=self.computed,
                profile=profile,
                expert=self.expert,
                expert_start=start,
                expert_steps=steps,
                changes=self.kept.changes,
            )
        context.step, context.timestep, context.sigma = clock.step, clock.timestep, clock.sigma
        context.branch, context.reused = clock.branch, self._last_reused
        return context

    def load(self, step: Step, compute: bool, leads: bool) -> None:
        """Hand every place that this call reuses its forecast, and note in ``step`` what that was."""
        if not self.simple:
            self._load_chosen(step, compute, leads)
            return
        network, step.computed = self.network, True
        for k, place in enumerate(network.places):
            forecast = None if compute else self._forecast(k, step.branch)
            network.reused[k] = reused = forecast is not None
            place.begin(reused, forecast)
            if reused:
                step.computed = False
        if step.computed and not compute:
            step.reason = "this branch has nothing to reuse"

    def _load_chosen(self, step: Step, compute: bool, leads: bool) -> None:
        """``load`` where not simply all is reused that a branch has."""
        places, self.partial = self.network.places, False
        wanted: list[Reused] = [False] * len(places) if compute else self._reused(step)
        reused = self.network.choose(wanted, leads)
        self.network.load([self._forecast(k, step.branch) if r else None for k, r in enumerate(reused)])
        step.computed = not any(reused)
        if self.listener is not None and leads:
            self.listener.settle(step.index, step.computed)
        if not compute and step.computed:
            step.reason = "this branch has nothing to reuse" if self.partial else "schedule"
        if self.chooses:
            step.sites = ", ".join([str(place.site) for place, r in zip(places, reused, strict=True) if r])

    def _reused(self, step: Step) -> list[Reused]:
        """Which places this branch reuses, at a step that is not computed. All branches of a step go together."""
        if self._chosen[0] != step.index:
            chosen = [self._choice(k, step.branch) for k in range(len(self.network.places))]
            self._chosen = step.index, chosen
            self._last_reused = [p.site for p, r in zip(self.network.places, chosen, strict=True) if r]
        self.partial = any(self._chosen[1])
        return [reused if self.kept.has(k, step.branch) else False for k, reused in enumerate(self._chosen[1])]

    def _choice(self, k: int, branch: str) -> Reused:
        owner = self.kept.owner(k, branch)
        if owner is None or not self.chooses:
            return owner is not None
        return self.session.strategy.reuses(self._context_of(k, owner), self.network.places[k].site)

    def _forecast(self, k: int, branch: str) -> Forecast | None:
        """What place ``k`` gives on a reused pass of a branch; None if nothing of the branch is kept."""
        history = self.kept.histories[k]
        halved = self.network.halves and self.network.places[k] is not self.network.guidance
        if self.kept.plain and not halved and branch in history.plain:
            return history.plain[branch]
        if branch not in history:
            return None
        trends = self.listener.trends() if self.listener is not None else (1.0,)
        return self.kept.forecast(k, self._context_of(k, branch), trends, halved)

    def _context_of(self, k: int, branch: str) -> Context:
        """What the strategy saw when it decided, with the steps of what place ``k`` has kept."""
        site, steps = self.network.places[k].site, self.kept.steps(k, branch)
        return replace(self.session.context, branch=branch, site=site, computed_steps=steps)
