//===- GraphReader.cpp - TorchScript's textual IR to calls ----------------===//
#include "GraphReader.h"
#include "fsdp/Support/Nesting.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/ir/irparser.h>

#include <limits>
#include <optional>
#include <unordered_map>

using namespace fsdp;
namespace jit = torch::jit;

namespace {
std::string firstLine(const std::string &text) {
  return text.substr(0, text.find('\n'));
}

const c10::Symbol kComplex = c10::Symbol::fromQualString("aten::Complex");

/// Reads one graph: its calls' arguments, results and schemas.
class GraphReader {
public:
  GraphReader(const std::string &path, const char *record,
              std::vector<CapturedCall> &calls)
      : path(path), record(record), calls(calls) {}

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
      else if (node->kind() == c10::prim::AutogradZero)
        constants.emplace(node->output(), plan::Arg{plan::NoneArg{}});
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
    throw CaptureError(path + ": " + record + ": " + what);
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
    const c10::FunctionSchema &schema = findSchema(call, qualified);
    if (node->inputs().size() != schema.arguments().size())
      fail("expected " + std::to_string(schema.arguments().size()) +
           " arguments of " + qualified + ", got " +
           std::to_string(node->inputs().size()));
    checkResults(node, schema, qualified);
    for (jit::Value *input : node->inputs())
      call.args.push_back(readArg(input));
    if (call.schema.empty())
      call.random = isRandom(schema) && !hasNoDropout(schema, call);
    std::vector<size_t> returns = defineOutputs(node, call, qualified);
    readAliasing(schema, returns, call);
    if (call.schema.empty())
      nameDevice(schema, call);
  }

  /// The schema of a call: LibTorch's for its own operators, the capture's for
  /// others, whose libraries are not needed here.
  const c10::FunctionSchema &findSchema(const CapturedCall &call,
                                        const std::string &qualified) {
    if (call.schema.empty()) {
      auto handle =
          c10::Dispatcher::singleton().findSchema({call.op, call.overload});
      if (!handle)
        fail("operator " + qualified + " is not known to this LibTorch");
      return handle->schema();
    }
    auto found = schemas.find(call.schema);
    if (found == schemas.end()) {
      if (nestingOf(call.schema) > kMaxNesting)
        fail("the schema of operator " + qualified + " is nested deeper than " +
             std::to_string(kMaxNesting));
      try {
        found =
            schemas.emplace(call.schema, jit::parseSchema(call.schema)).first;
      } catch (const std::exception &) {
        fail("expected a schema of operator " + qualified + ", got \"" +
             call.schema + "\"");
      }
    }
    const c10::FunctionSchema &schema = found->second;
    if (schema.name() != call.op || schema.overload_name() != call.overload)
      fail("expected the schema of operator " + qualified + ", got \"" +
           call.schema + "\"");
    return schema;
  }

  static bool isRandom(const c10::FunctionSchema &schema) {
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow(schema.name().c_str(),
                           schema.overload_name().c_str())
        .hasTag(at::Tag::nondeterministic_seeded);
  }

  static bool isList(const c10::TypePtr &type) {
    return type->kind() == c10::TypeKind::ListType;
  }

  /// Checks that the schema and the graph have as many results, of the same
  /// kinds.
  void checkResults(jit::Node *node, const c10::FunctionSchema &schema,
                    const std::string &qualified) const {
    if (schema.returns().size() != node->outputs().size())
      fail("expected " + std::to_string(schema.returns().size()) +
           " results of " + qualified + ", got " +
           std::to_string(node->outputs().size()));
    for (size_t i = 0; i < schema.returns().size(); ++i)
      if (isList(schema.returns()[i].type()) !=
          isList(node->outputs()[i]->type()))
        fail("expected " +
             std::string(isList(schema.returns()[i].type()) ? "a list"
                                                            : "a tensor") +
             " as result of " + qualified);
  }

  /// Numbers the results, with those of lists in a row; gives for each the
  /// index of its return in the schema.
  std::vector<size_t> defineOutputs(jit::Node *node, CapturedCall &call,
                                    const std::string &qualified) {
    std::vector<size_t> returns;
    for (size_t i = 0; i < node->outputs().size(); ++i) {
      jit::Value *output = node->outputs()[i];
      size_t count = 1;
      if (isList(output->type())) {
        // Numbered now, bound to names by the ListUnpack.
        count = node->outputs().size() == 1 ? call.outs.size()
                                            : unpackedCount(output);
        std::vector<plan::ValueId> &elements = listResults[output];
        for (size_t k = 0; k < count; ++k)
          elements.push_back(nextValue++);
        call.outValues.insert(call.outValues.end(), elements.begin(),
                              elements.end());
      } else {
        call.outValues.push_back(define(output));
      }
      returns.insert(returns.end(), count, i);
    }
    if (returns.size() != call.outs.size())
      fail("expected " + std::to_string(returns.size()) + " results of " +
           qualified + ", got " + std::to_string(call.outs.size()));
    return returns;
  }

  static size_t unpackedCount(jit::Value *list) {
    for (const jit::Use &use : list->uses())
      if (use.user->kind() == c10::prim::ListUnpack)
        return use.user->outputs().size();
    return 0;
  }

  void readUnpack(jit::Node *node) {
    auto it = listResults.find(node->input());
    if (it == listResults.end() || it->second.size() != node->outputs().size())
      fail("prim::ListUnpack of something that is not the result of "
           "a call with as many elements");
    for (size_t i = 0; i < node->outputs().size(); ++i)
      values.emplace(node->outputs()[i], it->second[i]);
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

  /// The results share storage with `self` although the schema does not say so:
  /// autograd does not count them as views. Of ATen's operators no others do
  /// (test_strides.py).
  static bool isUnannotatedView(const CapturedCall &call) {
    return call.op == "aten::_unsafe_view" || call.op == "aten::unsafe_split" ||
           call.op == "aten::unsafe_split_with_sizes";
  }

  /// `returns` has the schema's return of each result.
  static void readAliasing(const c10::FunctionSchema &schema,
                           const std::vector<size_t> &returns,
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
    for (size_t i = 0; i < call.outs.size(); ++i) {
      const c10::Argument &result = schema.returns()[returns[i]];
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
      call.views.assign(call.outs.size(), 0);
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
  std::unordered_map<jit::Value *, std::vector<plan::ValueId>> listResults;
  /// By their texts.
  std::unordered_map<std::string, c10::FunctionSchema> schemas;
  plan::ValueId nextValue = 0;
};
} // namespace

std::vector<plan::ValueId> fsdp::readGraph(const std::string &path,
                                           const char *record,
                                           const std::string &text,
                                           size_t inputs,
                                           std::vector<CapturedCall> &calls) {
  return GraphReader(path, record, calls).read(text, inputs);
}
