//===- LowerPasses.td - scheduled level to planned level ---*- tablegen -*-===//
//
// Included by Passes.td.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_TRANSFORMS_LOWERPASSES_TD
#define FSDP_TRANSFORMS_LOWERPASSES_TD

def BindReduceInputs
    : LevelPass<"fsdp-bind-reduce-inputs", "Scheduled", "Scheduled"> {
  let summary = "Let operators write gradients where the reduction reads them";
  let description = [{
    Follows each operand of an `fsdp.reduce_scatter` through views to the
    operator that allocates it. If that is result 0 of an `aten.call`, has the
    gradient's size, and nothing uses the storage after the reduction, the call
    is marked `reduce_input_of`: the runtime then lets it allocate in the
    collective's input buffer, and no copy-in is needed. A remark
    (`fsdp-in-place`) counts these gradients; a missed remark says for each other
    gradient what prevents it.
  }];
}

def InsertFrees
    : LevelPass<"fsdp-insert-frees", "Scheduled", "Lowered"> {
  let summary = "End the life of every value after its last use";
  let description = [{
    Inserts `fsdp.free` after the last use of each tensor and shard. Gathered
    parameters end with their `fsdp.reshard` instead. Storage that views share
    lives until the last of them is freed.
  }];
}

def AssignStreams
    : LevelPass<"fsdp-assign-streams", "Lowered", "Lowered"> {
  let summary = "Put ops on streams, and order them by events";
  let description = [{
    A collective or copy with a future runs on the stream of its kind
    (`fsdp.stream`), after what stands before it on the compute stream and after
    the copies that it takes: it waits for events (`fsdp.waits`) that these record
    (`fsdp.records`). An `fsdp.wait` waits for the event of what it awaits. An op
    on a stream that already follows a later op of the compute stream needs no
    event of an earlier one.

    Whatever begins beside the compute stream at the beginning of a microbatch
    follows an `fsdp.mark`, so that it follows the compute stream of the
    microbatch before.

    After: every order that instructions of different streams need is an event.
  }];
}

def InsertBuffers
    : LevelPass<"fsdp-insert-buffers", "Lowered", "Lowered"> {
  let summary = "Allocate the memory of collectives beside their results";
  let description = [{
    Where ranks have memory of their own (`fsdp.memory = "device"`, or the
    schedule's device), every op that needs memory beside its results gets an
    `fsdp.allocate`: a reduction its flat tensor, a copy to the device the
    copies, a reshard what it keeps. It is freed with the first op of the
    compute stream at whose end its user is complete
    ([DeviceBuffers.h](../include/fsdp/Plan/DeviceBuffers.h)).

    Before: streams and events are assigned. After: P34 holds.
  }];
}

def CompileKernels
    : LevelPass<"fsdp-compile-kernels", "Lowered", "Lowered"> {
  let summary = "Compile kernels to machine code";
  let description = [{
    Each `fsdp.kernel` gets `trips` and `code`: for every target, `image` in hex
    digits, which is position-independent and refers to nothing outside, or PTX, and
    `entry`, the byte where its function begins
    ([KernelAbi.h](../include/fsdp/Plan/KernelAbi.h)). A row-major walk over the
    elements is vectorised along the innermost dimension; each element is rounded
    as the calls round it. If the module was captured for a GPU, the image is PTX
    for that GPU, and a trip is what one thread of a grid does; if it does not
    say for which GPU, nothing changes. With `print`, the pass writes the MLIR of each kernel,
    before it is lowered to LLVM, to the standard error.
  }];
  let options = [
    ListOption<"targets", "targets", "std::string",
               "Processors to compile for (default: x86-64-v3, x86-64-v4; or the "
               "GPU that the module was captured for)">,
    Option<"print", "print", "bool", "false", "Write the kernels' MLIR">
  ];
}

def PlaceStorages
    : LevelPass<"fsdp-place-storages", "Lowered", "Planned"> {
  let summary = "Give every storage its place in the arena";
  let description = [{
    Each storage of the step and of the evaluation gets an offset in one arena,
    in bytes (`fsdp.offsets`, of arguments `fsdp.offset`), such that two
    storages that are alive at the same time have no byte in common; offloaded
    activations get an offset in the host's arena. The module attributes
    `fsdp.arena` and `fsdp.host_arena` say how many bytes the arenas have, and
    the most that are alive at once ([Memory.h](../include/fsdp/Plan/Memory.h)).

    Before: the module has everything that a plan has except for the arena, and
    the plan is valid. After: the module is the plan.
  }];
}

#endif // FSDP_TRANSFORMS_LOWERPASSES_TD
