//===- AtenOps.td - the aten dialect: compute ---------------*- tablegen -*-===//
#ifndef FSDP_DIALECT_ATENOPS_TD
#define FSDP_DIALECT_ATENOPS_TD

include "mlir/IR/AttrTypeBase.td"
include "mlir/IR/OpBase.td"
include "mlir/IR/OpAsmInterface.td"
include "mlir/Interfaces/SideEffectInterfaces.td"

def Aten_Dialect : Dialect {
  let name = "aten";
  let cppNamespace = "::mlir::aten";
  let summary = "Calls of ATen operators";
  let description = [{
    One op for all of ATen: passes reason about data flow, aliasing and cost,
    not over two thousand op definitions.
  }];
  let useDefaultAttributePrinterParser = 1;
}

def Aten_NoneAttr : AttrDef<Aten_Dialect, "None"> {
  let mnemonic = "none";
  let summary = "An absent optional argument";
}

def Aten_DeviceAttr : AttrDef<Aten_Dialect, "Device"> {
  let mnemonic = "device";
  let summary = "The device that the rank computes on";
}

def Aten_ComplexAttr : AttrDef<Aten_Dialect, "Complex"> {
  let mnemonic = "complex";
  let summary = "A complex number as an argument";
  let description = [{
    `#aten.complex<1.0 : f64, -0.5 : f64>`: real and imaginary part.
  }];
  let parameters = (ins "::mlir::FloatAttr":$real, "::mlir::FloatAttr":$imag);
  let assemblyFormat = "`<` $real `,` $imag `>`";
}

def Aten_CallOp : Op<Aten_Dialect, "call",
    [DeclareOpInterfaceMethods<MemoryEffectsOpInterface>,
     DeclareOpInterfaceMethods<OpAsmOpInterface, ["getAsmResultNames"]>]> {
  let summary = "Calls one operator on tensors";
  let description = [{
    ```mlir
    %2 = aten.call "aten::add.Tensor"(%0, %1, 1) : (tensor<2xf32>, tensor<2xf32>) -> tensor<2xf32>
    %3 = aten.call "aten::cat"([%0, %2], 0) : (tensor<2xf32>, tensor<2xf32>) -> tensor<4xf32>
    %4 = aten.call "aten::t"(%w) {views = array<i64: 0>} : (tensor<4x2xf32>) -> tensor<2x4xf32>
    ```

    Arguments are positional, one for each argument of the operator's schema,
    defaults included. `args` holds them with a unit attribute in the place of
    each tensor operand; `none` is an absent optional and `device` the rank's
    device. From the schema come

    - `views`: for each result the operand it aliases, or -1;
    - `mutates`: operands written in place;
    - `random`: the operator draws from the rank's random generator.

    `strides` has, for each result, the strides that it had when the model was
    captured, in elements, or an empty array if it was row-major. Without
    `strides` all results were row-major.

    A call without results asserts something: it stays where it is.

    `schema` is the schema, as captured, of an operator in a namespace other
    than `aten`, which neither the compiler nor LibTorch knows.

    `recompute` marks a call of forward that is made again in backward, because
    the first call's results were not kept (`fsdp-recompute-activations`).

    `reduce_input_of` (planned level) names the parameter whose gradient result
    0 allocates.

    **Call-1**: `args` has as many placeholders as there are operands.
    **Call-2**: `views` and `mutates` name operands that exist. **Call-3**: the
    name is `namespace::name` or `namespace::name.overload`. **Call-4**:
    `strides` has an array for each result, which is empty or has as many
    numbers as the result has dimensions, none of them negative. **Call-5**:
    `schema` is that of the callee.
  }];
  let arguments = (ins StrAttr:$callee,
                       Variadic<AnyRankedTensor>:$operands,
                       ArrayAttr:$args,
                       OptionalAttr<DenseI64ArrayAttr>:$views,
                       OptionalAttr<DenseI64ArrayAttr>:$mutates,
                       UnitAttr:$random,
                       OptionalAttr<FlatSymbolRefAttr>:$reduce_input_of,
                       UnitAttr:$recompute,
                       OptionalAttr<ArrayAttr>:$strides,
                       OptionalAttr<StrAttr>:$schema);
  let results = (outs Variadic<AnyRankedTensor>:$results);
  let assemblyFormat = [{
    $callee `(` custom<CallArgs>($operands, $args) `)` attr-dict `:`
    functional-type($operands, $results)
  }];
  let hasVerifier = 1;
  let builders = [
    // A call of new storage: its arguments in the order of the schema, defaults
    // included, tensors as values and the others as attributes.
    OpBuilder<(ins "::mlir::TypeRange":$results, "::llvm::StringRef":$callee,
                   "::llvm::ArrayRef<::mlir::OpFoldResult>":$arguments)>
  ];
  let extraClassDeclaration = [{
    /// The operand that result `index` aliases, or a null value.
    ::mlir::Value getViewedOperand(unsigned index);
  }];
}

#endif
