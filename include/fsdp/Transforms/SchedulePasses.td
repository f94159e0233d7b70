//===- SchedulePasses.td - sharded level to scheduled level *- tablegen -*-===//
//
// Included by Passes.td.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_TRANSFORMS_SCHEDULEPASSES_TD
#define FSDP_TRANSFORMS_SCHEDULEPASSES_TD

def SplitCollectives
    : LevelPass<"fsdp-split-collectives", "Sharded", "Scheduled"> {
  let summary = "Begin collectives, and wait for their results";
  let description = [{
    Gives each `fsdp.all_gather`, `fsdp.reduce_scatter` and `fsdp.all_reduce` of
    every program, and each copy of gradients to the host or of an activation, a
    future as its result, followed at once by an `fsdp.wait`.
  }];
}

def PrefetchAllGathers
    : LevelPass<"fsdp-prefetch-all-gathers", "Scheduled", "Scheduled"> {
  let summary = "Launch all-gathers before their parameters are needed";
  let description = [{
    Moves each `fsdp.all_gather` of the training step, with what it reads, ahead
    of the computation that hides it, by the costs of the schedule's `device`.
    The order of all-gathers does not change.

    - `latest_safe`: as late as possible (ALAP). From the last all-gather to the
      first, the latest launch is the all-gather's duration, plus a quarter of
      that in reserve, before its first use and before the next all-gather's
      launch. From the first to the last, an all-gather is launched at the first
      instruction at or after that time from which on it fits into
      `memory_budget`, together with the all-gathers launched before, but not
      before the link is nearly free. Time that computation has had to wait so far
      delays everything that follows. On plain numbers this is
      [LatestSafeLaunch.h](../lib/Transforms/Schedule/LatestSafeLaunch.h), which
      a test compares with all launches in this order.
    - `fsdp2`: an all-gather is launched when the one before it is complete,
      within a phase.
    - `none`: the pass changes nothing.

    An all-gather never passes the reshard of its unit. A remark (`fsdp-prefetch`)
    says where each was launched, and what limited it; a missed remark, that
    computation waits for it. A last remark says how far the simulated step is
    above the lower bound for its instructions.
  }];
}

def DelayReduceWaits
    : LevelPass<"fsdp-delay-reduce-waits", "Scheduled", "Scheduled"> {
  let summary = "Let computation go on while gradients are reduced";
  let description = [{
    Moves the wait for each `fsdp.reduce_scatter` to its first use, or before the
    reduction with which more than the schedule's `reduce_scatters_in_flight`
    would be in flight, if that comes first. So the gradients of at most that many
    units are held. An `fsdp.all_reduce` of the results moves along; it is awaited
    where its own results are used. A remark (`fsdp-reduce`) says where each wait
    is; a missed remark, that it had to come early.

    An `fsdp.copy_to_host` moves after the waits for what it copies. It is awaited
    where its results are used, or before the same number of others have begun. So
    the reduced gradients of at most that many units are held.
  }];
}

def OverlapActivationCopies
    : LevelPass<"fsdp-overlap-activation-copies", "Scheduled", "Scheduled"> {
  let summary = "Let computation go on while activations are copied";
  let description = [{
    The pass uses the costs of the schedule's `device`, whose host link carries
    one copy in each direction at a time:

    - The wait for an `fsdp.offload_activation` moves to where the copy has
      ended, so that its storage ends there and not before. It moves earlier if
      the storage would no longer fit into `memory_budget`.
    - An `fsdp.reload_activation` is launched ALAP: its duration, plus a quarter
      of that in reserve, before its first use and before the next one's launch,
      and after the wait for its copy out. It is launched later if it would not
      yet fit into `memory_budget`.
    - If an activation would have to come back before its copy out has ended, it
      stays on the device, if it fits: its copies are erased.

    With `prefetch: none` the pass changes nothing. Remarks of category
    `fsdp-offload` say for each activation how much of its copies is hidden, or
    that it stays.
  }];
}

def StageCheckpoints
    : LevelPass<"fsdp-stage-checkpoints", "Scheduled", "Scheduled"> {
  let summary = "Copy the state of a checkpoint beside forward and backward";
  let description = [{
    If the schedule does not set `stage_checkpoints`, the pass changes nothing.
    Otherwise, for each unit with a parameter that the step updates, one
    `fsdp.stage_state` begins where forward first uses the unit, and all are
    awaited where backward ends. So the state that the step before left is
    copied while forward and backward read it, and is complete before the
    optimizer changes it.

    Before: the program has one `fsdp.optimizer_step`. After: P39 holds.
  }];
}

def FuseCalls : LevelPass<"fsdp-fuse-calls", "Scheduled", "Scheduled"> {
  let summary = "Run chains of calls as one kernel each";
  let description = [{
    If the schedule says `fuse = "none"`, or the module does not say for which GPU
    it was captured, the pass changes nothing. Nor does it with `fuse = "exact"`
    if the program was captured for a processor or a version of PyTorch for which
    the kernels' bits have not been compared with ATen's; a remark says so. With
    `fuse = "unproven"` it does, and a warning says so.

    The pass outlines chains of element-wise calls into an `fsdp.kernel` each, and
    an `fsdp.fused` takes their place where the last of them stood. Equal chains,
    as those of equal layers, share one kernel.

    A chain consists of calls with results of one shape, whose kernels of ATen
    round each element in one way that code can follow
    ([fusion.md](fusion.md) lists them). It does not reach across a collective,
    its wait, or any op other than an `aten.call`. A call joins a chain if one of
    its operands comes from there, and if nothing between needs what the chain
    makes or writes what it reads.

    Remarks of category `fsdp-fuse` say what each kernel saves, and why a chain
    ends where it does.
  }];
}

#endif // FSDP_TRANSFORMS_SCHEDULEPASSES_TD
