//===- FSDPDialect.td - the fsdp dialect -------------------*- tablegen -*-===//
#ifndef FSDP_DIALECT_FSDPDIALECT_TD
#define FSDP_DIALECT_FSDPDIALECT_TD

include "mlir/IR/OpBase.td"

def FSDP_Dialect : Dialect {
  let name = "fsdp";
  let cppNamespace = "::mlir::fsdp";
  let summary = "Fully sharded training: parameters, placements, collectives";
  let description = [{
    One training step of a model as a straight-line program, with its
    parameters, the mesh they are sharded over, and every collective explicit.

    The same dialect serves every level of the compiler:

    | level | what is in the program |
    | --- | --- |
    | captured | one device: `fsdp.read`, `aten.call`, `fsdp.gradients` |
    | grouped | every parameter has a unit |
    | placed | every parameter has a sharding |
    | gathered | parameters are read as shards: `fsdp.all_gather`, `fsdp.reshard` |
    | reduced | gradients are shards: `fsdp.reduce_scatter`, `fsdp.all_reduce` |
    | sharded | the whole step, with its update: `fsdp.optimizer_step` |
    | scheduled | collectives begin, and are waited for: `!fsdp.future`, `fsdp.wait` |
    | lowered | every value's life ends: `fsdp.free`; where gradients are written; then streams, events and buffers |
    | planned | also the place of every storage: all that a plan says |

    The module says its level in the attribute `fsdp.level`. A pass goes from one
    level to another and refuses a module of a third one. A module that is written
    by hand may leave the attribute out; the first pass gives it its own.

    ```mlir
    module attributes {fsdp.level = #fsdp.level<sharded>} { … }
    ```

    **Level-1**: `fsdp.level` is an `#fsdp.level` and an attribute of the module.

    A module that was captured says for which device and version of PyTorch, in
    `fsdp.captured_for`: its calls are those that PyTorch makes there. The plan
    has it too.

    ```mlir
    module attributes {fsdp.captured_for = {arch = "sm_90", device = "cuda", torch = "2.15.0"}} { … }
    ```

    **Captured-1**: `fsdp.captured_for` has the texts `device` and `torch`, and is
    an attribute of the module.

    Collectives are never `Pure`: they have effects on one communication
    resource, so that no generic pass merges a backward re-gather into the
    forward gather or changes the order that every rank must agree on.

    What a program means lies in its ops and attributes, and not in their
    locations, which are for errors alone: the text of a module without debug
    info is the same program. Any op may have `fsdp.module`, the qualified name
    of the module whose forward, or the backward of it, made it, and `fsdp.line`,
    the line of the model's source. Without `fsdp.module` it is the model itself,
    or none. Units, checkpoints and offloads depend on modules; the plan has both.

    ```mlir
    %1 = aten.call "aten::silu"(%0) {fsdp.line = "models/llama.py:70", fsdp.module = "layers.0.mlp"} : (tensor<4xf32>) -> tensor<4xf32>
    ```

    **Origin-1**: `fsdp.module` and `fsdp.line` are texts that are not empty.

    An argument of a program is an input of the step: `fsdp.name` is its name in
    a batch, `fsdp.low` and `fsdp.high` bound its integers, `fsdp.strides` are
    those of a batch that is not row-major.

    **Input-1**: `fsdp.name` is a text, `fsdp.low` and `fsdp.high` are integers,
    and `fsdp.strides` has as many numbers as the input has dimensions.

    A pass that places an op says why it stands there, for people, in the
    attribute `fsdp.why`. The plan has it too.

    **Why-1**: `fsdp.why` is a text that is not empty.

    At the planned level the program says all that its plan says. Any op that
    becomes an instruction has the stream that it runs on, if that is not the
    compute stream, the events that it waits for, and the event that it records;
    its results have their offsets in the arena, in bytes, and -1 if they have
    none: views, and results that nobody uses. An argument of the program has
    `fsdp.offset`. The module says what memory ranks have in `fsdp.memory`, and
    how large the arenas of device and host are:

    ```mlir
    module attributes {fsdp.memory = "device", fsdp.arena = {bytes = 4096, lower_bound = 4096}} { … }
    %1 = fsdp.all_gather @u %0 {fsdp.stream = "all_gather", fsdp.waits = array<i32: 3>, fsdp.records = 4 : i32, fsdp.offsets = array<i64: 512>} : (…) -> …
    ```

    **Memory-1**: `fsdp.memory` is `"shared"` or `"device"`, and an attribute of
    the module.
    **Arena-1**: `fsdp.arena` and `fsdp.host_arena` have `bytes` and
    `lower_bound`, and are attributes of the module.
    **Stream-1**: `fsdp.stream` is the name of a stream, `fsdp.waits` are numbers
    of events, and `fsdp.records` is one.
    **Offset-1**: `fsdp.offsets` has a byte or -1 for each result, and
    `fsdp.offset` is the byte of an argument.
  }];
  let hasOperationAttrVerify = 1;
  let hasRegionArgAttrVerify = 1;
  let useDefaultAttributePrinterParser = 1;
  let useDefaultTypePrinterParser = 1;
}

#endif
