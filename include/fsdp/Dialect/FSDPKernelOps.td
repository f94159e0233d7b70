//===- FSDPKernelOps.td - calls that run as one ------------*- tablegen -*-===//
//
// Included by FSDPOps.td.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_DIALECT_FSDPKERNELOPS_TD
#define FSDP_DIALECT_FSDPKERNELOPS_TD

include "mlir/IR/RegionKindInterface.td"

def FSDP_KernelOp : FSDP_Op<"kernel", [
    Symbol, IsolatedFromAbove, SingleBlock]> {
  let summary = "Calls that run as one (from the scheduled level on)";
  let description = [{
    The calls say what is computed, in which order it is rounded, and are what
    runs where there is no code for the processor. `operand_strides` has the
    strides of each operand, as `strides` of an `aten.call` has those of its
    results; `strides` are those of every result, which is dense. Without them
    all are row-major. `whole` says that no part of a kernel may run by itself.
    `fsdp-compile-kernels` adds the `code`, and `trips`, the length of its loop.

    ```mlir
    fsdp.kernel @mul_add {
    ^bb0(%a: tensor<8x4xf32>, %b: tensor<4xf32>):
      %0 = aten.call "aten::mul.Tensor"(%a, %b) : (tensor<8x4xf32>, tensor<4xf32>) -> tensor<8x4xf32>
      %1 = aten.call "aten::add.Tensor"(%a, %0, 1) : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<8x4xf32>
      fsdp.kernel_return %1 : tensor<8x4xf32>
    }
    ```

    **Kernel-1**: the body consists of calls that write no operand, alias none,
    and draw no random numbers; the results have one shape; there is an array of
    strides for each operand.
  }];
  let arguments = (ins SymbolNameAttr:$sym_name,
                       OptionalAttr<ArrayAttr>:$operand_strides,
                       OptionalAttr<DenseI64ArrayAttr>:$strides,
                       UnitAttr:$whole,
                       OptionalAttr<I64Attr>:$trips,
                       OptionalAttr<DictionaryAttr>:$code);
  let regions = (region SizedRegion<1>:$body);
  let assemblyFormat = "$sym_name $body attr-dict";
  let hasRegionVerifier = 1;
  let extraClassDeclaration = [{
    KernelReturnOp getReturn();
  }];
}

def FSDP_KernelReturnOp : FSDP_Op<"kernel_return", [
    Pure, Terminator, HasParent<"KernelOp">]> {
  let summary = "The results of a kernel";
  let arguments = (ins Variadic<AnyRankedTensor>:$results);
  let assemblyFormat = "($results^ `:` type($results))? attr-dict";
}

def FSDP_FusedOp : FSDP_Op<"fused", [
    FSDP_NamedResults, FSDP_InProgram, Pure,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "Runs a kernel (from the scheduled level on)";
  let description = [{
    ```mlir
    %y = fsdp.fused @mul_add(%x, %w) : (tensor<8x4xf32>, tensor<4xf32>) -> tensor<8x4xf32>
    ```

    **Fused-1**: the symbol is that of an `fsdp.kernel` with operands and results
    of these types.
  }];
  let arguments = (ins FlatSymbolRefAttr:$kernel,
                       Variadic<AnyRankedTensor>:$operands);
  let results = (outs Variadic<AnyRankedTensor>:$results);
  let assemblyFormat = [{
    $kernel `(` $operands `)` attr-dict `:` functional-type($operands, $results)
  }];
}

#endif // FSDP_DIALECT_FSDPKERNELOPS_TD
