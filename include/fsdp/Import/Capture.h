//===- Capture.h - a captured training step, neither Torch nor MLIR -------===//
//
// What model.pt holds, in standard types: CaptureReader.cpp (Torch) fills it,
// ImportCapture.cpp (MLIR) turns it into IR, so that no translation unit needs
// both libraries' headers.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_IMPORT_CAPTURE_H
#define FSDP_IMPORT_CAPTURE_H

#include "fsdp/Plan/Plan.h"

namespace fsdp {

struct CapturedParam {
  std::string name;
  std::vector<std::string> aliases;
  plan::TensorSpec spec;
  bool requiresGrad = true;
  /// What the step computes with.
  plan::DType computeDtype = plan::DType::Float32;
  /// The index in model.parameters().
  int64_t position = 0;
  /// Of a unit that is called several times in a step: the calls that backward
  /// has gone through when the gradient is whole.
  int64_t postBackward = 0;

  plan::TensorSpec computeSpec() const { return {spec.shape, computeDtype}; }
};

/// What one unit was captured with, as in FSDP2's MixedPrecisionPolicy.
struct CapturedPrecision {
  std::string module; ///< qualified name, empty for the root
  std::optional<plan::DType> paramDtype;
  std::optional<plan::DType> reduceDtype;
  std::optional<plan::DType> outputDtype;
  bool castForwardInputs = true;
};

/// One call. Values of a graph are numbered: its inputs first (for the
/// step parameters, buffers, inputs; the initialisation has none), then the
/// results of calls in order.
struct CapturedCall {
  std::string op;       ///< "aten::add"
  std::string overload; ///< "Tensor", or empty
  /// One per schema argument; TensorArg holds a value number.
  plan::ArgList args;
  std::vector<plan::TensorSpec> outs;
  /// One for each of `outs`.
  std::vector<plan::Strides> outStrides;
  std::vector<plan::ValueId> outValues;
  /// For each result the tensor operand (counted over args) it aliases, or -1.
  std::vector<int64_t> views;
  /// Tensor operands (counted over args) written in place.
  std::vector<int64_t> mutates;
  /// Draws from the random generator.
  bool random = false;
  /// The schema of an operator in a namespace other than aten, which this
  /// LibTorch need not know.
  std::string schema;
  std::string module; ///< qualified name of the module that made the call
  std::string file;   ///< source of the call in the model, or empty
  int64_t line = -1;
};

/// How the model initialises itself, as a graph of its own.
struct CapturedInit {
  std::vector<CapturedCall> calls;
  /// (index into Capture::params or buffers, value) of each initial value.
  std::vector<std::pair<int32_t, plan::ValueId>> params, buffers;
};

/// The loss in eval mode, as a graph of its own with the step's inputs.
struct CapturedEvaluation {
  std::vector<CapturedCall> calls;
  plan::ValueId loss = -1;
};

struct Capture {
  std::string model;
  plan::CapturedFor capturedFor;
  std::optional<plan::ModelParallel> modelParallel;
  /// (qualified name, class) of each module.
  std::vector<std::pair<std::string, std::string>> modules;
  plan::Weights weights;
  std::vector<CapturedParam> params;
  std::vector<CapturedPrecision> precision;
  /// The modules of each unit of the capture except the root.
  std::vector<std::vector<std::string>> units;
  /// (module, input) for each module for which it makes a difference to the
  /// sums of gradients whether it is a unit.
  std::vector<std::pair<std::string, std::string>> entries;
  std::vector<plan::Buffer> buffers;
  /// Input::value is the value number.
  std::vector<plan::Input> inputs;
  std::vector<CapturedCall> calls;
  /// Index into calls of the first backward call.
  size_t backwardBegin = 0;
  plan::ValueId loss = -1;
  /// (index into params, value) of each gradient.
  std::vector<std::pair<int32_t, plan::ValueId>> grads;
  std::optional<CapturedInit> init;
  std::optional<CapturedEvaluation> evaluation;
};

/// A file that is not a usable capture; the message names file and defect.
struct CaptureError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Reads model.pt. Throws CaptureError. Defined in the library
/// FSDPCaptureReader, which needs LibTorch.
Capture readCapture(const std::string &path);

/// Loads FSDPCaptureReader, and LibTorch with it, which takes a third of a
/// second. Throws CaptureError.
void loadCaptureReader();

/// The same as readCapture(); calls loadCaptureReader() first.
Capture loadCapture(const std::string &path);

} // namespace fsdp

#endif // FSDP_IMPORT_CAPTURE_H
