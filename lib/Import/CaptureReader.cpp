//===- CaptureReader.cpp - model.pt to a Capture --------------------------===//
//
// model.pt is a TorchScript archive with two extra files: `graph.ir`, the ATen
// graph of the step in TorchScript's textual IR, and `capture.json`, what that
// form cannot hold (names, shapes, source positions). Aliasing, mutation and
// randomness come from the operators' schemas.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Import/Capture.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <caffe2/serialize/inline_container.h>
#include <nlohmann/json.hpp>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/ir/irparser.h>

#include <fstream>
#include <limits>
#include <system_error>
#include <unordered_map>

using namespace fsdp;
namespace jit = torch::jit;
using nlohmann::json;

namespace {
class CaptureReader {
public:
  explicit CaptureReader(std::string path) : path(std::move(path)) {}

  Capture read() {
    std::string graphText, captureText;
    readArchive(graphText, captureText);
    json document = parseJson(captureText);
    try {
      readTables(document);
    } catch (const json::exception &error) {
      fail("capture.json: " + std::string(error.what()));
    }
    auto graph = std::make_shared<jit::Graph>();
    try {
      jit::parseIR(graphText, graph.get());
    } catch (const std::exception &error) {
      fail("graph.ir: " + firstLine(error.what()));
    }
    readGraph(*graph, document);
    return std::move(capture);
  }

private:
  [[noreturn]] void fail(const std::string &what) {
    throw CaptureError(path + ": " + what);
  }

  static std::string firstLine(const std::string &text) {
    return text.substr(0, text.find('\n'));
  }

  void readArchive(std::string &graphText, std::string &captureText) {
    if (!std::ifstream(path))
      fail("cannot be read: " + std::generic_category().message(errno));
    std::unique_ptr<caffe2::serialize::PyTorchStreamReader> reader;
    try {
      reader = std::make_unique<caffe2::serialize::PyTorchStreamReader>(path);
    } catch (const std::exception &) {
      fail("expected a TorchScript archive written by fsdp_mlir.capture, got "
           "a file that is not a readable zip archive");
    }
    auto record = [&](const std::string &name) {
      if (!reader->hasRecord("extra/" + name))
        fail("expected an archive written by fsdp_mlir.capture, got one "
             "without \"" +
             name + "\" (a plain TorchScript or torch.save file?)");
      try {
        auto [data, size] = reader->getRecord("extra/" + name);
        return std::string(static_cast<const char *>(data.get()), size);
      } catch (const std::exception &) {
        fail("the record \"" + name + "\" is damaged");
      }
    };
    captureText = record("capture.json");
    graphText = record("graph.ir");
  }

  json parseJson(const std::string &text) {
    try {
      json document = json::parse(text);
      if (document.value("format", json()) != 1)
        fail("capture.json: expected format 1, got: " +
             document.value("format", json()).dump());
      return document;
    } catch (const json::exception &error) {
      fail("capture.json: " + std::string(error.what()));
    }
  }

  //===--------------------------------------------------------------------===//
  // capture.json
  //===--------------------------------------------------------------------===//

  plan::TensorSpec readSpec(const json &entry) {
    plan::TensorSpec spec;
    entry.at("shape").get_to(spec.shape);
    auto name = entry.at("dtype").get<std::string>();
    std::optional<plan::DType> dtype = plan::parseDType(name);
    if (!dtype)
      fail("capture.json: tensors of dtype \"" + name + "\" are not supported");
    spec.dtype = *dtype;
    return spec;
  }

  void readTables(const json &document) {
    document.at("model").get_to(capture.model);
    if (const json &weights = document.at("weights"); !weights.is_null())
      capture.weights = {weights.at("path"), weights.at("hash")};
    for (const json &entry : document.at("params"))
      capture.params.push_back({entry.at("name"), entry.at("aliases"),
                                readSpec(entry), entry.at("requires_grad")});
    for (const json &entry : document.at("buffers"))
      capture.buffers.push_back(
          {entry.at("name"), readSpec(entry), entry.at("persistent")});
    for (const json &entry : document.at("inputs")) {
      plan::Input input;
      entry.at("name").get_to(input.name);
      input.spec = readSpec(entry);
      input.low = entry.value("low", int64_t{0});
      input.high = entry.value("high", int64_t{2});
      capture.inputs.push_back(std::move(input));
    }
    document.at("backward_begin").get_to(capture.backwardBegin);
    size_t index = 0;
    for (const json &entry : document.at("nodes")) {
      CapturedCall call;
      entry.at("op").get_to(call.op);
      entry.at("overload").get_to(call.overload);
      if (int64_t module = entry.at("module"); module >= 0)
        document.at("modules").at(module).get_to(call.module);
      if (int64_t file = entry.at("file"); file >= 0)
        document.at("files").at(file).get_to(call.file);
      entry.at("line").get_to(call.line);
      for (const json &out : entry.at("outs"))
        call.outs.push_back(out.is_null() ? plan::TensorSpec{} : readSpec(out));
      capture.calls.push_back(std::move(call));
      ++index;
    }
    if (capture.backwardBegin > index)
      fail("capture.json: backward_begin is " +
           std::to_string(capture.backwardBegin) + ", expected at most " +
           std::to_string(index));
  }

  //===--------------------------------------------------------------------===//
  // graph.ir
  //===--------------------------------------------------------------------===//

  void readGraph(jit::Graph &graph, const json &document) {
    size_t expected =
        capture.params.size() + capture.buffers.size() + capture.inputs.size();
    if (graph.inputs().size() != expected)
      fail("graph.ir: expected " + std::to_string(expected) + " inputs, got " +
           std::to_string(graph.inputs().size()));
    for (jit::Value *input : graph.inputs())
      define(input);
    for (size_t i = 0; i < capture.inputs.size(); ++i)
      capture.inputs[i].value =
          capture.params.size() + capture.buffers.size() + i;

    size_t next = 0;
    for (jit::Node *node : graph.nodes()) {
      if (node->kind() == c10::prim::Constant)
        constants.emplace(node->output(), readConstant(node));
      else if (node->kind() == c10::aten::Float)
        constants.emplace(node->output(), readFloat(node));
      else if (node->kind() == c10::prim::ListConstruct)
        lists.emplace(node->output(), node);
      else if (node->kind() == c10::prim::ListUnpack)
        readUnpack(node);
      else if (node->kind() == c10::prim::TupleConstruct)
        readOutputs(node, document);
      else if (next == capture.calls.size())
        fail("graph.ir: expected " + std::to_string(next) +
             " calls as in capture.json, got more");
      else
        readCall(node, capture.calls[next++]);
    }
    if (next != capture.calls.size() || capture.loss < 0)
      fail("graph.ir: expected " + std::to_string(capture.calls.size()) +
           " calls and a result tuple, got " + std::to_string(next));
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
      fail("graph.ir: a constant of type " + node->output()->type()->str() +
           " is not supported");
    }
  }

  /// A float that the textual IR cannot spell travels as `aten::Float("nan")`.
  plan::Arg readFloat(jit::Node *node) {
    plan::Arg text = readArg(node->input());
    if (const auto *spelled = std::get_if<std::string>(&text.value);
        spelled && *spelled == "nan")
      return {std::numeric_limits<double>::quiet_NaN()};
    fail("graph.ir: aten::Float of something other than \"nan\"");
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
    fail("graph.ir: %" + value->debugName() + " is used before it is defined");
  }

  void readCall(jit::Node *node, CapturedCall &call) {
    if (call.op != node->kind().toQualString())
      fail("graph.ir: expected " + call.op + " as in capture.json, got " +
           node->kind().toQualString());
    std::string qualified =
        call.op + (call.overload.empty() ? "" : "." + call.overload);
    auto handle =
        c10::Dispatcher::singleton().findSchema({call.op, call.overload});
    if (!handle)
      fail("operator " + qualified + " is not known to this LibTorch");
    const c10::FunctionSchema &schema = handle->schema();
    if (node->inputs().size() != schema.arguments().size())
      fail("graph.ir: expected " + std::to_string(schema.arguments().size()) +
           " arguments of " + qualified + ", got " +
           std::to_string(node->inputs().size()));
    for (jit::Value *input : node->inputs())
      call.args.push_back(readArg(input));
    call.random = handle->hasTag(at::Tag::nondeterministic_seeded);
    readAliasing(schema, call);
    nameDevice(schema, call);
    defineOutputs(node, call, qualified);
  }

  void defineOutputs(jit::Node *node, CapturedCall &call,
                     const std::string &qualified) {
    bool isList = node->outputs().size() == 1 &&
                  node->output()->type()->kind() == c10::TypeKind::ListType;
    if (!isList && node->outputs().size() != call.outs.size())
      fail("graph.ir: expected " + std::to_string(call.outs.size()) +
           " results of " + qualified + ", got " +
           std::to_string(node->outputs().size()));
    if (isList) {
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
      fail("graph.ir: prim::ListUnpack of something that is not the result of "
           "a call with as many elements");
    for (size_t i = 0; i < node->outputs().size(); ++i)
      values.emplace(node->outputs()[i], it->second->outValues[i]);
  }

  void readOutputs(jit::Node *node, const json &document) {
    std::vector<int32_t> grads = document.at("grads");
    if (node->inputs().size() != grads.size() + 1)
      fail("graph.ir: expected a loss and " + std::to_string(grads.size()) +
           " gradients, got " + std::to_string(node->inputs().size()) +
           " results");
    auto number = [&](jit::Value *value) {
      auto it = values.find(value);
      if (it == values.end())
        fail("graph.ir: result %" + value->debugName() + " is not a tensor");
      return it->second;
    };
    capture.loss = number(node->inputs()[0]);
    for (size_t i = 0; i < grads.size(); ++i) {
      if (grads[i] < 0 ||
          grads[i] >= static_cast<int32_t>(capture.params.size()))
        fail("capture.json: gradient of parameter " + std::to_string(grads[i]) +
             ", which does not exist");
      capture.grads.emplace_back(grads[i], number(node->inputs()[i + 1]));
    }
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
    bool listResult =
        schema.returns().size() == 1 &&
        schema.returns()[0].type()->kind() == c10::TypeKind::ListType;
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
    if (isUnannotatedView(call))
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

  std::string path;
  Capture capture;
  std::unordered_map<jit::Value *, plan::ValueId> values;
  std::unordered_map<jit::Value *, plan::Arg> constants;
  std::unordered_map<jit::Value *, jit::Node *> lists;
  std::unordered_map<jit::Value *, CapturedCall *> listResults;
  plan::ValueId nextValue = 0;
};
} // namespace

Capture fsdp::readCapture(const std::string &path) {
  return CaptureReader(path).read();
}
