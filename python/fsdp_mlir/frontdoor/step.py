"""`Step`: the training step of a sharded model. Its plans are compiled as its batches need them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_mlir.frontdoor import around
from fsdp_mlir.frontdoor.assuming import Assuming
from fsdp_mlir.frontdoor.breaking import Breaking
from fsdp_mlir.frontdoor.checkpoints import Checkpoints
from fsdp_mlir.frontdoor.plan import LIMIT, Compiled, with_place
from fsdp_mlir.frontdoor.plans import Plans
from fsdp_mlir.frontdoor.reported import Reported, Result
from fsdp_mlir.frontdoor.requests import OF_LOOP, Requests
from fsdp_mlir.frontdoor.saved_state import SavedState
from fsdp_mlir.frontdoor.settling import IN_VAIN, Settling
from fsdp_mlir.frontdoor.several import Several, first
from fsdp_mlir.frontdoor.together import (
    COMPILE,
    EAGER,
    ELSEWHERE,
    FOR_FSDP2,
    OTHER_VALUES,
    READY,
    RELIES,
    Agreed,
    Calls,
    NoPlan,
    has_no_plan,
    told_as,
    warn_of_fallback,
)
from fsdp_mlir.frontdoor.varying import Varying
from fsdp_mlir.modules import sharding, weights
from fsdp_mlir.modules.hooks import AfterStep
from fsdp_mlir.state import optimizers, own_step
from fsdp_mlir.step import eager
from fsdp_mlir.step.batches import MORE_VALUES, OTHER_NUMBERS, Batch, Inputs, split
from fsdp_mlir.step.eager import Clipping
from fsdp_mlir.step.numbers import Refused
from fsdp_mlir.step.outputs import scalar_of
from fsdp_mlir.step.training_step import EachLoss, Loss, TrainingStep
from fsdp_mlir.support import policy_schema
from fsdp_mlir.support.autocast import without_autocast
from fsdp_mlir.support.errors import CompileError, CountedError

Example = Tensor | Sequence[Any] | Mapping[str, Any]

# Options that only a plan follows: without them FSDP2's step would be a different one.
_OF_PLAN = policy_schema.keys_where("compile", "plan")


class Step(SavedState, Reported):
    """A training step of a model, compiled for each kind of batch that it gets.

    Calls are collective: all ranks make them in the same order. If a compiled step fails, here or
    on another rank, it raises RuntimeError on every rank, and the object cannot be used any more.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        optimizer: torch.optim.Optimizer | None,
        clipping: Clipping | None,
        config: dict[str, Any],
        plans: Plans,
        rendezvous: Any,
        *,
        evaluation: bool,
        outputs: bool,
        fallback: str,
        deadline: float,
    ) -> None:
        self._model = model
        self._loss = loss
        self._optimizer = optimizer
        self._clipping = clipping
        self._config = config
        self._plans = plans
        self._rendezvous = rendezvous
        self._evaluation = evaluation
        # Without a loss function the output is the model's, which may be large.
        self._gives_outputs = outputs or loss is not None
        self._fallback = fallback
        self._groups = sharding.groups(model)
        self._has_parts = sharding.has_parts(model)
        self._inputs = Inputs(model, loss)
        self._varying = Varying(self._inputs, plans)
        self._requests = Requests(
            model,
            optimizer,
            clipping,
            config,
            self._inputs,
            evaluation=evaluation,
            gives_outputs=self._gives_outputs,
        )
        self._cache: dict[Any, Compiled | None] = {}  # None: there is no plan
        self._several = Several(self._cache)
        self._evaluators: dict[Any, Compiled] = {}
        self._several_evaluators = Several(self._evaluators)
        self._steps = 0
        self._own_update = AfterStep(optimizer, self._count)  # the loop's, of gradients from here
        # Of all plans, once one has run.
        self._scaler: tuple[float, int] | None = None
        self._updates: int | None = None
        self._checkpoints: Checkpoints | None = None
        falls_back = optimizer is not None and not any(map(config.get, _OF_PLAN))
        self._settling = Settling(plans, can=falls_back)
        self._calls = Calls()
        can_assume = falls_back and fallback == "eager" and not config.get("grad_scaler")
        self._assuming = Assuming(self._calls, plans, can=can_assume)
        self._breaking = Breaking(model, loss, plans, rendezvous.rank)
        self._told: set[str] = set()  # why a call had no plan
        try:
            if not isinstance(model, FSDPModule):
                raise NoPlan("fully_shard was called on parts of the model alone")
            self._calls.meet(plans.comm, rendezvous, deadline)
        except (NoPlan, RuntimeError) as error:
            self._without_plan(NoPlan(str(error)))

    # --- training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Trains on this rank's batch and returns its loss, a scalar; if `loss` returns more than
        that, all of it.

        The batch is the inputs in their order, or by name, or one sequence or mapping of them. With
        n `gradient_accumulation_steps` the batch has n times the samples of a microbatch: n
        microbatches in a row, whose mean loss is returned.
        """
        self._expect_optimizer("step")
        batch = self._inputs.named(args, kwargs)
        microbatches = split(batch, self._requests.count)
        sharding.reshard(self._groups)
        params = weights.of_model(self._model)
        # FSDP2 adds to gradients that eager code left.
        outside = self._outside(params) or any(param.grad is not None for param in params)
        compiled = self._plan("gradients" if outside else "update", microbatches, params)
        outside = outside or not self._assuming.updates
        if compiled is None:
            return self._eager_step(microbatches)
        if self._optimizer is not None and not outside:
            compiled.session.follow(optimizers.followed(self._optimizer))
            # As its own step does, for the schedulers' check of the order of calls.
            self._optimizer._opt_called = True  # type: ignore[attr-defined]
        compiled.bound.optimizer_state(self._steps)
        session = compiled.session
        if self._scaler is not None:
            session.scaler = self._scaler
        if self._updates is not None and self._optimizer is None:
            session.updates = self._updates
        result = self._train(compiled, microbatches)
        if result is None:
            return self._eager_step(microbatches)
        self._scaler, self._updates = session.scaler, session.updates
        self._result = Result(result.grad_norm, result.loss_scale, bool(result.skipped))
        self._steps += 1
        if outside:
            self._take_gradients(compiled)
            if not result.skipped:
                self._update()
            elif self._optimizer is not None:
                self._optimizer.zero_grad()
        else:
            compiled.bound.fill(skipped=bool(result.skipped))
        return compiled.returned(result.loss)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward and backward of one microbatch and returns its loss. Leaves reduced
        gradients in the parameters, added to those already there, as loss.backward() does with
        FSDP2."""
        return self._backward(self._inputs.named(args, kwargs))

    def _backward(self, batch: Batch) -> Any:
        microbatches = split(batch, 1)
        self._own_update.expect()
        sharding.reshard(self._groups)
        compiled = self._plan("backward", microbatches, weights.of_model(self._model))
        if compiled is not None:
            compiled.bound.optimizer_state(self._steps)
            if (result := self._train(compiled, microbatches)) is not None:
                self._take_gradients(compiled)
                return compiled.returned(result.loss)
        with self._breaking.observed():
            (value,) = eager.backward(self._eager(batch), [list(batch.values())])
        return self._returned(value)

    def accumulate(self, microbatches: Sequence[Example]) -> list[Any]:
        """Runs forward and backward of microbatches whose gradients are reduced together, as FSDP2
        does after set_requires_gradient_sync(False) for all but the last. Returns the loss of each.
        The gradients are those of the sum."""
        batches = [self._inputs.named((batch,), {}) for batch in microbatches]
        count = len(batches)
        if count == 1:
            return [scalar_of(self._backward(batches[0]))]
        self._own_update.expect()
        sharding.reshard(self._groups)
        compiled = self._plan("accumulate", batches, weights.of_model(self._model))
        if compiled is not None and (why := EachLoss.why_not(count, compiled.loss_dtype)):
            self._say(why)
            compiled = None
        if compiled is None:
            inputs = [list(batch.values()) for batch in batches]
            steps = self._eager(batches[0])
            return [
                scalar_of(value)
                for value in eager.backward(steps, inputs, reduce_each=False, mean=False)
            ]
        compiled.bound.optimizer_state(self._steps)
        self._train(compiled, batches)
        self._take_gradients(compiled)
        return list(self._requests.losses(count).to(compiled.loss_dtype, copy=True))

    def update(self) -> None:
        """Clips the gradients of the parameters, if asked for, makes the optimizer's step, and
        drops the gradients."""
        self._expect_optimizer("update")
        if self._optimizer is None:
            raise TypeError("update: expected an optimizer of torch in compile, got a config")
        if self._config.get("lr_schedule"):
            raise CompileError("lr_schedule: only a plan's update follows it; use a scheduler")
        self._update()
        self._steps += 1

    def _count(self) -> None:
        self._steps += 1

    def _update(self) -> None:
        sharding.reshard(self._groups)
        self._own_update.forget()  # whoever calls this counts the step
        with without_autocast():
            norm = self._clipping.apply(self._model) if self._clipping else None
            self._result = Result(norm, self._result.loss_scale, False)
            self._optimizer.step()
        self._optimizer.zero_grad()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the loss function returns for this rank's batch in eval mode, without
        training; without a loss function, what the model returns, or its loss if compile had
        `evaluation`."""
        (batch,) = split(self._inputs.named(args, kwargs), 1)
        sharding.reshard(self._groups)
        if self._plans.trained is not None:
            self._plans.trained.settle()
        self._inputs.note([batch])
        form = self._evaluation_form(batch)
        keys = self._several_evaluators.keys(form)
        current = self._current(keys, training=False)
        serving = self._several_evaluators.serving(keys, current, [batch], evaluation=True)
        why = around.entered() or self._inputs.unfit(batch)

        def own_way(key: Any, serves: bool) -> tuple[int, str]:
            made = self._evaluators[key] if serves else None
            ready = made and made.fits([batch]) and (len(current) == 1 or made.bind())
            return (FOR_FSDP2 if why else READY if ready else EAGER), why

        key, answer = self._agreed_on_one(form, keys, serving, own_way)
        if answer.said == READY and answer.serving:
            compiled = self._evaluators[key]
            (inputs,) = compiled.inputs([batch], evaluation=True)
            run = compiled.gathered().session.evaluate
            loss = self._ran(key, compiled, run, inputs, inputs)
            if loss is not None:
                compiled.evaluated(batch)
                return compiled.returned(loss, evaluation=True)
            if self._assuming.gives_up(key):
                for each in keys:
                    del self._evaluators[each]
        value = eager.evaluate(self._eager(batch), list(batch.values()))
        return self._returned(value) if self._evaluation else value

    # --- plans

    def _plan(
        self,
        kind: str,
        microbatches: list[dict[str, Any]],
        params: list[nn.Parameter],
    ) -> Compiled | None:
        """The plan for this call, compiled if there is none yet, with what it reads bound to it;
        None if the call runs as FSDP2 does."""
        if self._plans.trained is not None:
            self._plans.trained.settle()
        self._inputs.note(microbatches)
        if not self._assuming.updates and kind == "update":
            kind = "gradients"
        form = self._requests.key(kind, microbatches, params)
        form = with_place(form, self._inputs.given(microbatches[0]), self._cache)
        keys = self._several.keys(form)
        any_way = self._any_way(form, kind, microbatches, params)
        current = [] if any_way else self._current(keys)
        serving = self._several.serving(keys, current, microbatches)

        def own_way(key: Any, serves: bool) -> tuple[int, str]:
            # What another plan has been bound to since is new where the step assigns it.
            is_current = key in current and (len(current) == 1 or self._cache[key].bind())
            return any_way or self._own_way(key, microbatches, is_current, serves)

        key, answer = self._agreed_on_one(form, keys, serving, own_way)
        if answer.said == COMPILE:  # a rank has no plan of the model as it is
            key = form
        compiled, said = self._cache.get(key), answer.said
        if compiled is not None:
            self._settling.note(key, said)
        if said == COMPILE and compiled is not None and self._varying.hold(compiled):
            return self._plan(kind, microbatches, params)
        if said == RELIES:
            key = self._several.another(form)
            if key is None:
                if self._assuming.asked(form) is not None and self._breaking.relies():
                    for each in keys:
                        del self._cache[each]
                else:
                    self._say(MORE_VALUES)
                return None
        if said in (COMPILE, RELIES):
            for each in keys[1:] if said == COMPILE else ():
                self._cache.pop(each)
            try:
                beside = said == RELIES
                compiled = self._compile(key, kind, microbatches, place=form[-1], beside=beside)
            except Refused:
                return self._plan(kind, microbatches, params)
            if self._settling.is_unsettled(compiled):
                self._settle(key)
                return None
            if compiled is not None:  # on all ranks, of which another one's plan may rely on them
                takes = compiled.takes(microbatches)
                said = self._agreed(key, READY if takes else OTHER_VALUES).said
        return compiled.gathered() if compiled and said in (READY, COMPILE, RELIES) else None

    def _any_way(
        self,
        key: Any,
        kind: str,
        microbatches: list[dict[str, Any]],
        params: list[nn.Parameter],
    ) -> tuple[int, str] | None:
        """What this rank does whatever the plans are; and why, if that is what FSDP2 does."""
        why = self._requests.why_eager(kind, microbatches, params)
        if not why and key[-1] == LIMIT:
            why = OTHER_NUMBERS
        if why or (key not in self._cache and (why := self._inputs.vary(microbatches[0]))):
            return FOR_FSDP2, why
        if (
            (key in self._cache and self._cache[key] is None)
            or not sharding.reduces_now(self._model, self._groups)
            or not self._calls.has_met
        ):
            return EAGER, ""
        return None

    def _current(self, keys: list[Any], *, training: bool = True) -> list[Any]:
        """The keys of plans of the model as it is. If there is one alone, it is bound to that."""
        made: Mapping[Any, Compiled | None] = self._cache if training else self._evaluators
        found = ((key, made.get(key)) for key in keys)
        return [
            key
            for key, each in found
            if each is not None and self._is_current(each, training=training)
        ]

    def _evaluation_form(self, batch: Batch) -> Any:
        key = self._requests.evaluation_key(batch)
        return with_place(key, self._inputs.given(batch), self._evaluators)

    def _own_way(
        self, key: Any, microbatches: list[dict[str, Any]], is_current: bool, serves: bool
    ) -> tuple[int, str]:
        """What this rank would do with the plan of a key, and why, if that is what FSDP2 does."""
        compiled = self._cache.get(key)
        if compiled and is_current:
            if not compiled.fits(microbatches):
                return OTHER_VALUES, ""
            return (READY if serves else RELIES), ""
        if why := self._changed():
            return FOR_FSDP2, why
        return self._settling.again(key, compiled) if compiled else (COMPILE, "")

    def _changed(self) -> str:
        """Why there can be no further plan of the model as it is; empty if there can."""
        trained = self._plans.trained
        return self._requests.dtype_changed() or (trained.changed(self._model) if trained else "")

    def _is_current(self, compiled: Compiled, *, training: bool = True) -> bool:
        return compiled.is_current(training=training) and compiled.bind()

    def _settle(self, key: Any) -> None:
        if why := self._settling.settle(key):
            self._cache[key] = None
            self._without_plan(NoPlan(why))

    def _agreed_on_one(
        self,
        form: Any,
        keys: Sequence[Any],
        serving: int,
        own_way: Callable[[Any, bool], tuple[int, str]],
    ) -> tuple[Any, Agreed]:
        """The key of one of the plans for a form, of which those that are `serving` serve this
        rank's values, and what all ranks do with that. `own_way` is what this rank would do with
        it, if there is one that serves."""
        key = keys[first(serving)]
        answer = self._agreed(form, *own_way(key, bool(serving)), serving)
        if answer.said == READY and not answer.first:
            serving = answer.serving
            key = keys[first(serving)]
            answer = self._agreed(form, *own_way(key, bool(serving)), serving)
        return key, answer

    def _agreed(self, key: Any, own: int, why: str = "", serving: int = 1) -> Agreed:
        answer = self._calls.agreed(key, own, why, serving)
        if answer.why:
            self._say(answer.why)
        return answer

    def _say(self, why: str) -> None:
        """Why a call has no plan, once."""
        if why not in self._told:
            self._without_plan(NoPlan(why))

    def _train(self, compiled: Compiled, microbatches: Sequence[Batch]) -> Any:
        """None if FSDP2 makes the step, before which all is as it was."""
        inputs = compiled.inputs(microbatches)
        key = next(key for key, made in self._cache.items() if made is compiled)
        result = self._ran(key, compiled, compiled.session.step, inputs, inputs[0])
        if result is None:
            compiled.session.take_gradients()
            if self._assuming.guesses_again(key):
                del self._cache[key]
            elif why := self._assuming.gives_up(key):
                self._cache[key] = None
                self._say(why)
            return None
        compiled.leave(len(microbatches))
        compiled.take(microbatches)
        return result

    def _ran(
        self,
        key: Any,
        compiled: Compiled,
        run: Callable[[Any], Any],
        given: Any,
        inputs: Sequence[Tensor],
    ) -> Any:
        """`inputs` are those of the first microbatch, which is the only one where a plan assumes
        something."""

        def call() -> Any:
            result = self._calls.run(run, given)
            compiled.bound.trained.has_run()
            return result

        return self._assuming.ran(key, compiled, call, inputs)

    def _compile(
        self,
        key: Any,
        kind: str,
        microbatches: list[Batch],
        *,
        place: int,
        is_example: bool = False,
        beside: bool = False,
    ) -> Compiled | None:
        """None if there is none. Raises Refused for numbers that are fixed from then on."""
        if self._settling.passes_over(key, self._cache):
            self._say(IN_VAIN)
            return None
        request = self._requests.request(
            kind,
            microbatches,
            place=place,
            is_example=is_example,
            assume=self._assuming.asked(key),
            breaks=self._breaking.breaks,
        )
        library = self._config.get("optimizer", {}).get("library", "")
        self._breaking.breaks.begin()
        try:
            compiled = self._plans.compile(request, library)
        except Exception as error:
            if has_no_plan(error):
                if request.assume is not None and self._assuming.count(error):
                    raise Refused(str(error), ()) from error
                if self._settling.begins(key, error, self._cache):
                    return None
                if request.breaks is not None and self._breaking.begins(error):
                    return None
                if self._varying.count(error):
                    raise Refused(str(error), ()) from error
            varies = bool(request.numbers or request.held or request.unread)
            if varies and has_no_plan(error):
                self._varying.fix(request, library, error)
            repeats = varies or isinstance(error, CountedError)
            if not repeats or told_as(error) not in self._told:
                self._without_plan(error)
            compiled = None
        self._settling.tried(key, compiled, self._cache)
        self._cache[key] = compiled
        if compiled is not None and compiled.captured.assumption.breaks:
            self._breaking.tell()
        if compiled is not None and compiled.session.evaluates:
            form = self._evaluation_form(microbatches[0])
            another = self._several_evaluators.another(form) if beside else None
            for each in [] if another else self._several_evaluators.keys(form)[1:]:
                del self._evaluators[each]
            self._evaluators[another or form] = compiled
        return compiled

    def _compile_example(self, example: Example) -> None:
        batch = self._inputs.named((example,), {})
        self._inputs.note([batch])
        self._inputs.vary(batch)
        sharding.reshard(self._groups)
        if self._calls.has_met:
            why, told = self._plans.together(self._changed, str)
            if any(told):
                return self._say(why or ELSEWHERE)
            params = weights.of_model(self._model)
            outside = self._outside(params) or not self._assuming.updates
            kind, count = "gradients" if outside else "update", self._requests.count
            if isinstance(self._optimizer, optimizers.NoOptimizer):
                kind, count = "backward", 1
            key = *self._requests.key(kind, [batch] * count, params), 0
            try:
                compiled = self._compile(key, kind, [batch], place=0, is_example=True)
            except Refused:
                return self._compile_example(example)
            if self._settling.is_unsettled(compiled):
                del self._cache[key]  # until the first call, which settles it

    def _without_plan(self, error: Exception) -> None:
        if self._fallback == "error" or not has_no_plan(error):
            raise error
        missing = [key for key in _OF_PLAN if self._config.get(key)]
        if missing or self._optimizer is None:
            raise CompileError(
                f"{error}; without a plan '{(missing or ['optimizer'])[0]}' of the config is not "
                "there"
            ) from error
        self._told.add(told_as(error))
        warn_of_fallback(self._rendezvous.rank, type(self._model).__name__, error)

    def _outside(self, params: list[nn.Parameter]) -> str:
        """Why the optimizer's step is not in a plan; empty if it is."""
        if self._optimizer is None:
            return ""
        if self._clipping is not None and not self._clipping.has_plan:
            return "the norm of clipping"
        if self._clipping is not None and self._has_parts:
            return "the norm is that of the parts of other ranks too"
        return own_step.why(self._optimizer, params)

    # --- FSDP2's way

    def _eager(self, batch: Batch) -> TrainingStep:
        return TrainingStep(self._model, list(batch), self._inputs.positional, self._loss)

    def _eager_step(self, microbatches: list[dict[str, Any]]) -> Any:
        options = {key: self._config.get(key, True) for key in OF_LOOP[1:]}
        with self._breaking.observed():
            values = eager.backward(
                self._eager(microbatches[0]),
                [list(batch.values()) for batch in microbatches],
                reduce_each=options["reduce_each_microbatch"],
                all_reduce_each=options["all_reduce_each_microbatch"],
            )
        self.update()
        return self._returned(values[0]) if len(values) == 1 else eager.mean_loss(values)

    def _returned(self, value: Any) -> Any:
        """What the caller gets of the value, as a plan would return it."""
        return value if self._gives_outputs else scalar_of(value)

    def _take_gradients(self, compiled: Compiled) -> None:
        assert self._plans.trained is not None
        self._plans.trained.add_gradients(compiled.session.take_gradients())
