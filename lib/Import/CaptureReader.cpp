//===- CaptureReader.cpp - model.pt to a Capture --------------------------===//
//
// model.pt is a TorchScript archive with extra files: `graph.ir`, the ATen
// graph of the step in TorchScript's textual IR; `init.ir` and `eval.ir`, those
// of the model's initialisation and of its loss in eval mode, where they were
// captured; and `capture.json`, what that form cannot hold (names, shapes,
// source positions). GraphReader reads the graphs, the rest is read here.
//
//===----------------------------------------------------------------------===//
#include "GraphReader.h"
#include "fsdp/Plan/ModelCollectives.h"
#include "fsdp/Plan/ParseJson.h"

#include <caffe2/serialize/inline_container.h>

#include <memory>
#include <optional>
#include <set>
#include <system_error>

#include <sys/stat.h>

using namespace fsdp;
using nlohmann::json;

namespace {
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
  [[noreturn]] void fail(const std::string &what) const {
    throw CaptureError(path + ": " + what);
  }

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

  std::vector<plan::ValueId> readGraph(const char *record, size_t inputs,
                                       std::vector<CapturedCall> &calls) {
    return fsdp::readGraph(path, record, readRecord(record), inputs, calls);
  }

  json parseJson(const std::string &text) {
    try {
      json document = plan::parseJson(text, path + ": capture.json");
      if (document.value("format", json()) != 2)
        fail("capture.json: expected format 2, got: " +
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

  /// Absent from the captures of versions that knew the CPU alone.
  void readDevice(const json &document) {
    auto found = document.find("device");
    if (found == document.end())
      return;
    auto &[device, arch, torch, numerics] = capture.capturedFor;
    found->at("type").get_to(device);
    if (const json &name = found->at("arch"); !name.is_null())
      name.get_to(arch);
    found->at("torch").get_to(torch);
    if ((device != "cpu" && device != "cuda") || torch.empty() ||
        arch.empty() != (device == "cpu"))
      fail("capture.json: expected the device \"cpu\", or \"cuda\" with an "
           "arch, and a version of torch, got: " +
           found->dump());
    if (auto settings = found->find("numerics"); settings != found->end())
      settings->get_to(numerics);
    if (std::string defect = plan::findDefect(numerics); !defect.empty())
      fail("capture.json: " + defect);
  }

  /// Absent from the captures of versions that knew no other axes.
  void readModelParallel(const json &document) {
    auto found = document.find("model_parallel");
    if (found == document.end() || found->is_null())
      return;
    plan::ModelParallel &parallel = capture.modelParallel.emplace();
    found->at("ranks").get_to(parallel.ranks);
    found->at("data_stride").get_to(parallel.dataStride);
    for (const json &axis : found->at("axes"))
      parallel.axes.push_back(
          {axis.at("name"), axis.at("ranks"), axis.at("stride")});
    if (std::string defect = plan::findDefect(parallel); !defect.empty())
      fail("capture.json: " + defect);
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
    readDevice(document);
    readModelParallel(document);
    if (const json &weights = document.at("weights"); !weights.is_null())
      capture.weights = {weights.at("path"), weights.at("hash")};
    for (const json &entry : document.at("params"))
      capture.params.push_back(
          {entry.at("name"), entry.at("aliases"), readSpec(entry),
           entry.at("requires_grad"), readDType(entry.at("compute_dtype")),
           entry.at("position"), entry.value("post_backward", int64_t{0})});
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
      if (!call.op.starts_with("aten::"))
        readOperator(document, call);
      for (const json &out : entry.at("outs")) {
        call.outs.push_back(out.is_null() ? plan::TensorSpec{} : readSpec(out));
        call.outStrides.push_back(out.is_null() ? plan::Strides()
                                                : readStrides(out));
      }
      calls.push_back(std::move(call));
    }
    return calls;
  }

  /// What capture.json says of an operator that LibTorch does not have.
  void readOperator(const json &document, CapturedCall &call) {
    std::string name =
        call.op + (call.overload.empty() ? "" : "." + call.overload);
    const json operators = document.value("operators", json::object());
    if (!operators.contains(name))
      fail("capture.json: expected the schema of operator \"" + name +
           "\" in \"operators\"");
    operators.at(name).at("schema").get_to(call.schema);
    operators.at(name).at("random").get_to(call.random);
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

    std::vector<plan::ValueId> results = readGraph(
        "graph.ir", firstInput + capture.inputs.size(), capture.calls);
    std::vector<int32_t> grads = document.at("grads");
    if (results.size() != grads.size() + 1)
      fail("graph.ir: expected a loss and " + std::to_string(grads.size()) +
           " gradients, got " + std::to_string(results.size()) + " results");
    checkComputed(results, firstInput + capture.inputs.size(), "graph.ir");
    capture.loss = results[0];
    std::set<int32_t> seen;
    for (size_t i = 0; i < grads.size(); ++i) {
      checkIndex(grads[i], capture.params.size(), "gradient of parameter");
      if (!seen.insert(grads[i]).second)
        fail("expected one gradient of parameter " +
             capture.params[size_t(grads[i])].name + ", got two");
      capture.grads.emplace_back(grads[i], results[i + 1]);
    }
  }

  void readInit(const json &document, const json &entry) {
    CapturedInit &init = capture.init.emplace();
    init.calls = readNodes(document, entry.at("nodes"));
    std::vector<plan::ValueId> results =
        readGraph("init.ir", /*inputs=*/0, init.calls);
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
    size_t inputs =
        capture.params.size() + capture.buffers.size() + capture.inputs.size();
    std::vector<plan::ValueId> results =
        readGraph("eval.ir", inputs, evaluation.calls);
    if (results.size() != 1)
      fail("eval.ir: expected a loss, got " + std::to_string(results.size()) +
           " results");
    checkComputed(results, inputs, "eval.ir");
    evaluation.loss = results[0];
  }

  /// Checks that no result is an input, for which the program would compute
  /// nothing.
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

extern "C" void fsdpReadCapture(const std::string &path, Capture &capture) {
  capture = readCapture(path);
}
