//===- FSDPDialect.td - the fsdp dialect -------------------*- tablegen -*-===//
#ifndef FSDP_DIALECT_FSDPDIALECT_TD
#define FSDP_DIALECT_FSDPDIALECT_TD

include "mlir/IR/OpBase.td"

def FSDP_Dialect : Dialect {
  let name = "fsdp";
  let cppNamespace = "::mlir::fsdp";
  let summary = "Fully sharded training: parameters, placements, collectives";
  let description = [{
    One training step of a model as a program without branches, whose
    microbatches are a region, with its parameters, the mesh they are sharded
    over, and every collective explicit.

    The same dialect serves every level of the compiler:

    | level | what is in the program |
    | --- | --- |
    | captured | one device: `fsdp.read`, `aten.call`, `fsdp.gradients` |
    | grouped | every parameter has a unit |
    | placed | every parameter has a sharding |
    | gathered | parameters are read as shards: `fsdp.all_gather`, `fsdp.reshard` |
    | reduced | gradients are shards: `fsdp.reduce_scatter`, `fsdp.all_reduce` |
    | sharded | the whole step, with its update: `fsdp.optimizer_step` |
    | scheduled | collectives are launched and awaited: `!fsdp.future`, `fsdp.wait` |
    | lowered | the end of every value's life: `fsdp.free`; where gradients are written; then streams, events and buffers |
    | planned | also the place of every storage: everything that a plan contains |

    The module attribute `fsdp.level` says at which level a module is. A pass
    takes a module from one level to another and rejects a module at a third
    one. A module that is written by hand may omit the attribute; the first pass
    accepts it and sets it.

    ```mlir
    module attributes {fsdp.level = #fsdp.level<sharded>} { … }
    ```

    **Level-1**: `fsdp.level` is an `#fsdp.level` and an attribute of the module.

    For a captured module, `fsdp.captured_for` says for which device and version
    of PyTorch it was captured: its calls are those that PyTorch makes there.
    The plan has this attribute too.

    ```mlir
    module attributes {fsdp.captured_for = {arch = "sm_90", device = "cuda",
      numerics = {deterministic_algorithms = "on"}, torch = "2.15.0"}} { … }
    ```

    `numerics` has the global settings of PyTorch that decide the bits of its
    kernels and were not the defaults.

    **Captured-1**: `fsdp.captured_for` has the strings `device` and `torch`,
    may have an `arch` such as `sm_90`, and is an attribute of the module.
    **Captured-2**: its `numerics` are settings that the runtime knows, with
    values that they take.

    A model that was parallelised before FSDP, by tensor parallelism for
    example, makes collectives of its own: calls of `_c10d_functional`, whose
    last argument names the axis of the mesh. `fsdp.model_parallel` says what
    these axes are: each of the mesh's ranks stands for `ranks` that share a
    copy of the model; neighbours on the mesh have numbers `data_stride` apart.
    The plan has this attribute too.

    ```mlir
    module attributes {fsdp.model_parallel = {ranks = 8 : i64, data_stride = 8 : i64,
      axes = [{name = "tensor", ranks = 8 : i64, stride = 1 : i64} ]}} {
      %whole = aten.call "_c10d_functional::all_gather_into_tensor"(%part, 8, "tensor")
          : (tensor<4x16xf32>) -> tensor<32x16xf32>
    }
    ```

    **Axis-1**: `fsdp.model_parallel` has the numbers `ranks` and `data_stride`,
    and `axes` of a `name`, `ranks` and `stride`; the names differ, the numbers
    are at least 1; it is an attribute of the module. **Axis-2**: a collective
    that the model makes is a known one, over one of these axes, says its number
    of ranks if it says any, and has results of the shapes that it gives.

    Collectives are never `Pure`: they have effects on one communication
    resource, so that no generic pass merges a backward re-gather into the
    forward gather or changes the order that every rank must agree on.

    The meaning of a program is in its ops and attributes, not in their
    locations, which are only for error messages: a module printed without debug
    info is the same program. Any op may have `fsdp.module`, the qualified name
    of the module whose forward or backward made it, and `fsdp.line`, the line
    of the model's source. An op without `fsdp.module` comes from the model
    itself, or from no module. Units, checkpoints and offloads depend on
    modules; the plan has both attributes.

    ```mlir
    %1 = aten.call "aten::silu"(%0) {fsdp.line = "models/llama.py:70", fsdp.module = "layers.0.mlp"} : (tensor<4xf32>) -> tensor<4xf32>
    ```

    **Origin-1**: `fsdp.module` and `fsdp.line` are non-empty strings.

    An argument of a program is an input of the step: `fsdp.name` is its name in
    a batch, `fsdp.low` and `fsdp.high` bound its integers, and `fsdp.strides`
    are the strides of a batch that is not row-major.

    **Input-1**: `fsdp.name` is a string, `fsdp.low` and `fsdp.high` are
    integers, and `fsdp.strides` has as many numbers as the input has
    dimensions.

    A pass that places an op says why it is there, for a human reader, in the
    attribute `fsdp.why`. The plan has this attribute too.

    **Why-1**: `fsdp.why` is a non-empty string.

    At the planned level the program contains everything that its plan contains.
    Any op that becomes an instruction has the stream that it runs on, if that
    is not the compute stream, the events that it waits for, and the event that
    it records. It also has the offsets of its results in the arena, in bytes,
    or -1 for a result without one: a view, or a result that nothing uses. An
    argument of the program has `fsdp.offset`. The module attribute
    `fsdp.memory` says what memory the ranks have; `fsdp.arena` and
    `fsdp.host_arena` say how large the arenas of the device and of the host
    are:

    ```mlir
    module attributes {fsdp.memory = "device", fsdp.arena = {bytes = 4096, lower_bound = 4096}} { … }
    %1 = fsdp.all_gather @u %0 {fsdp.stream = "all_gather", fsdp.waits = array<i32: 3>, fsdp.records = 4 : i32, fsdp.offsets = array<i64: 512>} : (…) -> …
    ```

    **Memory-1**: `fsdp.memory` is `"shared"` or `"device"`, and an attribute of
    the module.
    **Arena-1**: `fsdp.arena` and `fsdp.host_arena` have `bytes` and
    `lower_bound`, and are attributes of the module.
    **Stream-1**: `fsdp.stream` is the name of a stream, `fsdp.waits` are event
    numbers, and `fsdp.records` is one.
    **Offset-1**: `fsdp.offsets` has a byte offset or -1 for each result, and
    `fsdp.offset` is the byte offset of an argument.
  }];
  let hasOperationAttrVerify = 1;
  let hasRegionArgAttrVerify = 1;
  let useDefaultAttributePrinterParser = 1;
  let useDefaultTypePrinterParser = 1;
}

#endif
