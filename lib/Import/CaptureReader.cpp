//===- CaptureReader.cpp - model.pt to a Capture --------------------------===//
//
// model.pt is a TorchScript archive with extra files: `graph.ir`, the ATen
// graph of the step in TorchScript's textual IR; `init.ir` and `eval.ir`, those
// of the model's initialisation and of its loss in eval mode, where they were
// captured; and `capture.json`, what that form
// cannot hold (names, shapes, source positions). Aliasing, mutation and
// randomness come from the operators' schemas.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Import/Capture.h"
#include "fsdp/Plan/ParseJson.h"
#include "fsdp/Support/Nesting.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/ir/irparser.h>

#include <limits>
#include <optional>
#include <system_error>
#include <unordered_map>

#include <sys/stat.h>

using namespace fsdp;
namespace jit = torch::jit;
using nlohmann::json;

namespace {
[[noreturn]] void failAt(const std::string &path, const std::string &what) {
  throw CaptureError(path + ": " + what);
}

std::string firstLine(const std::string &text) {
  return text.substr(0, text.find('\n'));
}

const c10::Symbol kComplex = c10::Symbol::fromQualString("aten::Complex");

/// Reads one graph: its calls' arguments, results and schemas.
class GraphReader {
public:
  /// `record` names the graph in messages. `calls` are those of capture.json,
  /// to be completed.
  GraphReader(const std::string &path, const char *record,
              std::vector<CapturedCall> &calls)
      : path(path), record(record), calls(calls) {}

  /// Returns the elements of the result tuple.
  std::vector<plan::ValueId> read(const std::string &text, size_t inputs) {
    checkNesting(text);
    try {
      return readGraph(text, inputs);
    } catch (const c10::Error &error) { // a node without what its kind has
      fail(firstLine(error.what_without_backtrace()));
    }
  }

private:
  std::vector<plan::ValueId> readGraph(const std::string &text, size_t inputs) {
    jit::Graph graph;
    try {
      jit::parseIR(text, &graph);
    } catch (const std::exception &error) {
      fail(firstLine(error.what()));
    }
    if (graph.inputs().size() != inputs)
      fail("expected " + std::to_string(inputs) + " inputs, got " +
           std::to_string(graph.inputs().size()));
    for (jit::Value *input : graph.inputs())
      define(input);

    std::optional<std::vector<plan::ValueId>> results;
    size_t next = 0;
    for (jit::Node *node : graph.nodes()) {
      if (node->kind() == c10::prim::Constant)
        constants.emplace(node->output(), readConstant(node));
      else if (node->kind() == c10::aten::Float)
        constants.emplace(node->output(), readFloat(node));
      else if (node->kind() == kComplex)
        constants.emplace(node->output(), readComplex(node));
      else if (node->kind() == c10::prim::ListConstruct)
        lists.emplace(node->output(), node);
      else if (node->kind() == c10::prim::ListUnpack)
        readUnpack(node);
      else if (node->kind() == c10::prim::TupleConstruct)
        results = readResults(node);
      else if (next == calls.size())
        fail("expected " + std::to_string(next) +
             " calls as in capture.json, got more");
      else
        readCall(node, calls[next++]);
    }
    if (next != calls.size() || !results)
      fail("expected " + std::to_string(calls.size()) +
           " calls and a result tuple, got " + std::to_string(next));
    return *results;
  }

  [[noreturn]] void fail(const std::string &what) const {
    failAt(path, std::string(record) + ": " + what);
  }

  /// The parser calls itself for what stands in brackets, and for the blocks of
  /// a node, which are indented.
  void checkNesting(const std::string &text) const {
    size_t indent = 0;
    for (size_t line = 0; line < text.size();
         line = std::min(text.find('\n', line), text.size()) + 1)
      indent = std::max(
          indent,
          std::min(text.find_first_not_of(" \t", line), text.size()) - line);
    if (std::max(nestingOf(text), indent) > kMaxNesting)
      fail("nested deeper than " + std::to_string(kMaxNesting));
  }

  plan::ValueId define(jit::Value *value) {
    values.emplace(value, nextValue);
    return nextValue++;
  }

  plan::Arg readConstant(jit::Node *node) {
    if (!node->hasAttribute(c10::attr::value))
      return {plan::NoneArg{}};
    if (node->output()->type()->kind() == c10::TypeKind::DeviceObjType)
      return {plan::DeviceArg{}};
    switch (node->kindOf(c10::attr::value)) {
    case jit::AttributeKind::i:
      if (node->output()->type()->kind() == c10::TypeKind::BoolType)
        return {node->i(c10::attr::value) != 0};
      return {node->i(c10::attr::value)};
    case jit::AttributeKind::f:
      return {node->f(c10::attr::value)};
    case jit::AttributeKind::s:
      return {node->s(c10::attr::value)};
    default:
      fail("a constant of type " + node->output()->type()->str() +
           " is not supported");
    }
  }

  /// A float that the textual IR cannot spell travels as `aten::Float("nan")`.
  plan::Arg readFloat(jit::Node *node) {
    plan::Arg text = readArg(node->input());
    if (const auto *spelled = std::get_if<std::string>(&text.value);
        spelled && *spelled == "nan")
      return {std::numeric_limits<double>::quiet_NaN()};
    fail("aten::Float of something other than \"nan\"");
  }

  /// A complex number travels as `aten::Complex` of two floats.
  plan::Arg readComplex(jit::Node *node) {
    std::vector<double> parts;
    for (jit::Value *input : node->inputs()) {
      plan::Arg arg = readArg(input);
      if (const auto *part = std::get_if<double>(&arg.value))
        parts.push_back(*part);
    }
    if (parts.size() != 2 || node->inputs().size() != 2)
      fail("aten::Complex of something other than two floats");
    return {std::complex<double>(parts[0], parts[1])};
  }

  plan::Arg readArg(jit::Value *value) {
    if (auto it = values.find(value); it != values.end())
      return {plan::TensorArg{it->second}};
    if (auto it = constants.find(value); it != constants.end())
      return it->second;
    if (auto it = lists.find(value); it != lists.end()) {
      plan::ArgList elements;
      for (jit::Value *element : it->second->inputs())
        elements.push_back(readArg(element));
      return {std::move(elements)};
    }
    fail("%" + value->debugName() + " is used before it is defined");
  }

  void readCall(jit::Node *node, CapturedCall &call) {
    if (call.op != node->kind().toQualString())
      fail("expected " + call.op + " as in capture.json, got " +
           node->kind().toQualString());
    std::string qualified =
        call.op + (call.overload.empty() ? "" : "." + call.overload);
    auto handle =
        c10::Dispatcher::singleton().findSchema({call.op, call.overload});
    if (!handle)
      fail("operator " + qualified + " is not known to this LibTorch");
    const c10::FunctionSchema &schema = handle->schema();
    if (node->inputs().size() != schema.arguments().size())
      fail("expected " + std::to_string(schema.arguments().size()) +
           " arguments of " + qualified + ", got " +
           std::to_string(node->inputs().size()));
    checkResults(node, schema, call, qualified);
    for (jit::Value *input : node->inputs())
      call.args.push_back(readArg(input));
    call.random = handle->hasTag(at::Tag::nondeterministic_seeded) &&
                  !hasNoDropout(schema, call);
    readAliasing(schema, call);
    nameDevice(schema, call);
    defineOutputs(node, call);
  }

  static bool hasListResult(const c10::FunctionSchema &schema) {
    return schema.returns().size() == 1 &&
           schema.returns()[0].type()->kind() == c10::TypeKind::ListType;
  }

  /// That schema, graph and capture.json know as many; of a list the last.
  void checkResults(jit::Node *node, const c10::FunctionSchema &schema,
                    const CapturedCall &call,
                    const std::string &qualified) const {
    auto check = [&](size_t expected, size_t got) {
      if (expected != got)
        fail("expected " + std::to_string(expected) + " results of " +
             qualified + ", got " + std::to_string(got));
    };
    check(schema.returns().size(), node->outputs().size());
    if (!hasListResult(schema))
      check(schema.returns().size(), call.outs.size());
    else if (node->output()->type()->kind() != c10::TypeKind::ListType)
      fail("expected a list as result of " + qualified);
  }

  void defineOutputs(jit::Node *node, CapturedCall &call) {
    if (node->outputs().size() == 1 &&
        node->output()->type()->kind() == c10::TypeKind::ListType) {
      // Numbered now, bound to names by the ListUnpack.
      listResults.emplace(node->output(), &call);
      for (size_t i = 0; i < call.outs.size(); ++i)
        call.outValues.push_back(nextValue++);
      return;
    }
    for (jit::Value *output : node->outputs())
      call.outValues.push_back(define(output));
  }

  void readUnpack(jit::Node *node) {
    auto it = listResults.find(node->input());
    if (it == listResults.end() ||
        it->second->outValues.size() != node->outputs().size())
      fail("prim::ListUnpack of something that is not the result of "
           "a call with as many elements");
    for (size_t i = 0; i < node->outputs().size(); ++i)
      values.emplace(node->outputs()[i], it->second->outValues[i]);
  }

  std::vector<plan::ValueId> readResults(jit::Node *node) {
    std::vector<plan::ValueId> results;
    for (jit::Value *value : node->inputs()) {
      auto it = values.find(value);
      if (it == values.end())
        fail("result %" + value->debugName() + " is not a tensor");
      results.push_back(it->second);
    }
    return results;
  }

  //===--------------------------------------------------------------------===//
  // Schemas
  //===--------------------------------------------------------------------===//

  static int64_t countTensors(const plan::Arg &arg) {
    if (std::holds_alternative<plan::TensorArg>(arg.value))
      return 1;
    int64_t count = 0;
    if (const auto *list = std::get_if<plan::ArgList>(&arg.value))
      for (const plan::Arg &element : *list)
        count += countTensors(element);
    return count;
  }

  /// Attention without dropout draws nothing.
  static bool hasNoDropout(const c10::FunctionSchema &schema,
                           const CapturedCall &call) {
    std::optional<int> index = schema.argumentIndexWithName("dropout_p");
    return index && call.args[*index] == plan::Arg{0.0};
  }

  /// Batch normalisation in training writes its running statistics, arguments
  /// 3 and 4, although the schema does not say so.
  static bool isUnannotatedWrite(const CapturedCall &call, size_t argument) {
    return call.op == "aten::native_batch_norm" &&
           (argument == 3 || argument == 4) && call.args[5] == plan::Arg{true};
  }

  /// The result shares storage with `self` although the schema does not say so.
  static bool isUnannotatedView(const CapturedCall &call) {
    return call.op == "aten::_unsafe_view";
  }

  static void readAliasing(const c10::FunctionSchema &schema,
                           CapturedCall &call) {
    // The first tensor operand of each alias set that an argument names.
    std::unordered_map<std::string, int64_t> operandOfSet;
    int64_t operand = 0;
    for (size_t i = 0; i < call.args.size(); ++i) {
      int64_t count = countTensors(call.args[i]);
      const c10::AliasInfo *info = schema.arguments()[i].alias_info();
      if (count > 0 && isUnannotatedWrite(call, i))
        call.mutates.push_back(operand);
      if (info && count > 0) {
        for (c10::Symbol set : info->beforeSets())
          operandOfSet.emplace(set.toQualString(), operand);
        if (info->isWrite())
          for (int64_t k = 0; k < count; ++k)
            call.mutates.push_back(operand + k);
      }
      operand += count;
    }
    call.views.assign(call.outs.size(), -1);
    bool listResult = hasListResult(schema);
    for (size_t i = 0; i < call.outs.size(); ++i) {
      const c10::Argument &result = schema.returns()[listResult ? 0 : i];
      const c10::AliasInfo *info = result.alias_info();
      if (!info)
        continue;
      std::vector<c10::Symbol> sets(info->beforeSets().begin(),
                                    info->beforeSets().end());
      // Tensor(a)[] names its set on the elements.
      for (const c10::AliasInfo &contained : info->containedTypes())
        sets.insert(sets.end(), contained.beforeSets().begin(),
                    contained.beforeSets().end());
      for (c10::Symbol set : sets)
        if (auto it = operandOfSet.find(set.toQualString());
            it != operandOfSet.end())
          call.views[i] = it->second;
    }
    if (isUnannotatedView(call) && operand > 0)
      call.views[0] = 0;
  }

  /// A factory without a device means the rank's device.
  static void nameDevice(const c10::FunctionSchema &schema,
                         CapturedCall &call) {
    bool factory = true;
    for (const plan::Arg &arg : call.args)
      factory &= countTensors(arg) == 0;
    for (size_t i = 0; factory && i < call.args.size(); ++i)
      if (schema.arguments()[i].name() == "device")
        call.args[i].value = plan::DeviceArg{};
  }

  const std::string &path;
  const char *record;
  std::vector<CapturedCall> &calls;
  std::unordered_map<jit::Value *, plan::ValueId> values;
  std::unordered_map<jit::Value *, plan::Arg> constants;
  std::unordered_map<jit::Value *, jit::Node *> lists;
  std::unordered_map<jit::Value *, CapturedCall *> listResults;
  plan::ValueId nextValue = 0;
};

class CaptureReader {
public:
  explicit CaptureReader(std::string path) : path(std::move(path)) {}

  Capture read() {
    openArchive();
    json document = parseJson(readRecord("capture.json"));
    try {
      readTables(document);
      readStep(document);
      if (const json &init = document.at("init"); !init.is_null())
        readInit(document, init);
      if (const json &entry = document.at("evaluation"); !entry.is_null())
        readEvaluation(document, entry);
    } catch (const json::exception &error) {
      fail("capture.json: " + std::string(error.what()));
    }
    return std::move(capture);
  }

private:
  [[noreturn]] void fail(const std::string &what) const { failAt(path, what); }

  void openArchive() {
    struct stat info{};
    if (stat(path.c_str(), &info) != 0)
      fail("cannot be read: " + std::generic_category().message(errno));
    if (!S_ISREG(info.st_mode))
      fail("expected a file, got a folder, a pipe or a device");
    // A capture's records are stored as they are; of one that was packed again
    // this bounds what is unpacked.
    maxRecord = std::max<uint64_t>(uint64_t(info.st_size) * 64, 1 << 20);
    try {
      archive = std::make_unique<caffe2::serialize::PyTorchStreamReader>(path);
    } catch (const std::exception &) {
      fail("expected a TorchScript archive written by fsdp_mlir.capture, got "
           "a file that is not a readable zip archive");
    }
  }

  std::string readRecord(const std::string &name) {
    if (!archive->hasRecord("extra/" + name))
      fail("expected an archive written by fsdp_mlir.capture, got one "
           "without \"" +
           name + "\" (a plain TorchScript or torch.save file?)");
    uint64_t bytes = 0;
    try {
      bytes = archive->getRecordSize("extra/" + name);
      if (bytes <= maxRecord) {
        auto [data, size] = archive->getRecord("extra/" + name);
        return std::string(static_cast<const char *>(data.get()), size);
      }
    } catch (const std::exception &) {
      fail("the record \"" + name + "\" is damaged");
    }
    fail("expected at most " + std::to_string(maxRecord) +
         " bytes in the record \"" + name + "\", got " + std::to_string(bytes));
  }

  json parseJson(const std::string &text) {
    try {
      json document = plan::parseJson(text, path + ": capture.json");
      if (document.value("format", json()) != 1)
        fail("capture.json: expected format 1, got: " +
             document.value("format", json()).dump());
      return document;
    } catch (const plan::PlanError &error) {
      throw CaptureError(error.what());
    } catch (const json::exception &error) {
      fail("capture.json: " + std::string(error.what()));
    }
  }

  //===--------------------------------------------------------------------===//
  // capture.json
  //===--------------------------------------------------------------------===//

  plan::DType readDType(const json &name) {
    std::optional<plan::DType> dtype =
        plan::parseDType(name.get<std::string>());
    if (!dtype)
      fail("capture.json: tensors of dtype " + name.dump() +
           " are not supported");
    return *dtype;
  }

  plan::TensorSpec readSpec(const json &entry) {
    plan::TensorSpec spec;
    entry.at("shape").get_to(spec.shape);
    spec.dtype = readDType(entry.at("dtype"));
    int64_t bytes = plan::byteWidth(spec.dtype);
    for (int64_t extent : spec.shape)
      if (extent < 0 ||
          __builtin_mul_overflow(bytes, std::max<int64_t>(extent, 1), &bytes))
        fail("capture.json: expected the shape of a tensor, got: " +
             entry.at("shape").dump());
    return spec;
  }

  static plan::Strides readStrides(const json &entry) {
    return entry.value("strides", plan::Strides());
  }

  void readPrecision(const json &policies) {
    auto optional = [&](const json &name) -> std::optional<plan::DType> {
      if (name.is_null())
        return std::nullopt;
      return readDType(name);
    };
    for (const json &entry : policies)
      capture.precision.push_back({entry.at("module"),
                                   optional(entry.at("param_dtype")),
                                   optional(entry.at("reduce_dtype")),
                                   optional(entry.at("output_dtype")),
                                   entry.at("cast_forward_inputs")});
  }

  void readTables(const json &document) {
    document.at("model").get_to(capture.model);
    if (const json &weights = document.at("weights"); !weights.is_null())
      capture.weights = {weights.at("path"), weights.at("hash")};
    for (const json &entry : document.at("params"))
      capture.params.push_back({entry.at("name"), entry.at("aliases"),
                                readSpec(entry), entry.at("requires_grad"),
                                readDType(entry.at("compute_dtype"))});
    readPrecision(document.at("mixed_precision"));
    document.at("units").get_to(capture.units);
    for (const auto &[module, input] : document.at("entries").items())
      capture.entries.emplace_back(module, input.get<std::string>());
    for (const json &entry : document.at("buffers"))
      capture.buffers.push_back({entry.at("name"), readSpec(entry),
                                 entry.at("persistent"), readStrides(entry)});
    for (const json &entry : document.at("inputs")) {
      plan::Input input;
      entry.at("name").get_to(input.name);
      input.spec = readSpec(entry);
      input.low = entry.value("low", int64_t{0});
      input.high = entry.value("high", int64_t{2});
      input.strides = readStrides(entry);
      capture.inputs.push_back(std::move(input));
    }
  }

  std::vector<CapturedCall> readNodes(const json &document, const json &nodes) {
    std::vector<CapturedCall> calls;
    for (const json &entry : nodes) {
      CapturedCall call;
      entry.at("op").get_to(call.op);
      entry.at("overload").get_to(call.overload);
      if (int64_t module = entry.at("module"); module >= 0)
        document.at("modules").at(module).get_to(call.module);
      if (int64_t file = entry.at("file"); file >= 0)
        document.at("files").at(file).get_to(call.file);
      entry.at("line").get_to(call.line);
      for (const json &out : entry.at("outs")) {
        call.outs.push_back(out.is_null() ? plan::TensorSpec{} : readSpec(out));
        call.outStrides.push_back(out.is_null() ? plan::Strides()
                                                : readStrides(out));
      }
      calls.push_back(std::move(call));
    }
    return calls;
  }

  void readStep(const json &document) {
    capture.calls = readNodes(document, document.at("nodes"));
    if (document.at("modules").size() != document.at("classes").size())
      fail("capture.json: expected a class for each module");
    for (size_t i = 0; i < document.at("modules").size(); ++i)
      capture.modules.emplace_back(document.at("modules").at(i),
                                   document.at("classes").at(i));
    document.at("backward_begin").get_to(capture.backwardBegin);
    if (capture.backwardBegin > capture.calls.size())
      fail("capture.json: backward_begin is " +
           std::to_string(capture.backwardBegin) + ", expected at most " +
           std::to_string(capture.calls.size()));
    size_t firstInput = capture.params.size() + capture.buffers.size();
    for (size_t i = 0; i < capture.inputs.size(); ++i)
      capture.inputs[i].value = plan::ValueId(firstInput + i);

    std::vector<plan::ValueId> results =
        GraphReader(path, "graph.ir", capture.calls)
            .read(readRecord("graph.ir"), firstInput + capture.inputs.size());
    std::vector<int32_t> grads = document.at("grads");
    if (results.size() != grads.size() + 1)
      fail("graph.ir: expected a loss and " + std::to_string(grads.size()) +
           " gradients, got " + std::to_string(results.size()) + " results");
    checkComputed(results, firstInput + capture.inputs.size(), "graph.ir");
    capture.loss = results[0];
    for (size_t i = 0; i < grads.size(); ++i) {
      checkIndex(grads[i], capture.params.size(), "gradient of parameter");
      capture.grads.emplace_back(grads[i], results[i + 1]);
    }
  }

  void readInit(const json &document, const json &entry) {
    CapturedInit &init = capture.init.emplace();
    init.calls = readNodes(document, entry.at("nodes"));
    std::vector<plan::ValueId> results =
        GraphReader(path, "init.ir", init.calls)
            .read(readRecord("init.ir"), /*inputs=*/0);
    std::vector<int32_t> params = entry.at("params");
    std::vector<int32_t> buffers = entry.at("buffers");
    if (results.size() != params.size() + buffers.size())
      fail("init.ir: expected " +
           std::to_string(params.size() + buffers.size()) + " results, got " +
           std::to_string(results.size()));
    size_t next = 0;
    for (int32_t param : params) {
      checkIndex(param, capture.params.size(), "initial value of parameter");
      init.params.emplace_back(param, results[next++]);
    }
    for (int32_t buffer : buffers) {
      checkIndex(buffer, capture.buffers.size(), "initial value of buffer");
      init.buffers.emplace_back(buffer, results[next++]);
    }
  }

  void readEvaluation(const json &document, const json &entry) {
    CapturedEvaluation &evaluation = capture.evaluation.emplace();
    evaluation.calls = readNodes(document, entry.at("nodes"));
    std::vector<plan::ValueId> results =
        GraphReader(path, "eval.ir", evaluation.calls)
            .read(readRecord("eval.ir"), capture.params.size() +
                                             capture.buffers.size() +
                                             capture.inputs.size());
    if (results.size() != 1)
      fail("eval.ir: expected a loss, got " + std::to_string(results.size()) +
           " results");
    checkComputed(results,
                  capture.params.size() + capture.buffers.size() +
                      capture.inputs.size(),
                  "eval.ir");
    evaluation.loss = results[0];
  }

  /// That no result is an input, of which the program would do nothing.
  void checkComputed(const std::vector<plan::ValueId> &results, size_t inputs,
                     const char *record) const {
    for (plan::ValueId result : results)
      if (size_t(result) < inputs)
        fail(std::string(record) + ": expected results of calls, got input " +
             std::to_string(result));
  }

  void checkIndex(int32_t index, size_t size, const char *what) const {
    if (index < 0 || index >= static_cast<int32_t>(size))
      fail("capture.json: " + std::string(what) + " " + std::to_string(index) +
           ", which does not exist");
  }

  std::string path;
  std::unique_ptr<caffe2::serialize::PyTorchStreamReader> archive;
  uint64_t maxRecord = 0;
  Capture capture;
};
} // namespace

Capture fsdp::readCapture(const std::string &path) {
  return CaptureReader(path).read();
}
