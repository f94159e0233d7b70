//===- NativeForm.cpp - native checkpoints for and from other programs ----===//
#include "fsdp/Runtime/Checkpoint/NativeForm.h"
#include "fsdp/Runtime/Checkpoint/CheckpointFolder.h"
#include "fsdp/Runtime/Checkpoint/Manifest.h"
#include "fsdp/Runtime/Checkpoint/NativeCheckpoint.h"
#include "fsdp/Runtime/Checkpoint/ShardFile.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/DataSource.h"
#include "fsdp/Runtime/Files/SafeTensors.h"
#include "fsdp/Runtime/Files/WeightFiles.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <set>
#include <utility>
#include <variant>

namespace fsdp::runtime {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr char kRun[] = "fsdp_mlir.run", kStep[] = "train_state.step",
               kEpoch[] = "lr_scheduler.last_epoch";
constexpr std::string_view kState = "optimizer.state.",
                           kGroups = "optimizer.param_groups.";

json printRun(const RunState &state) {
  json scaler;
  if (state.scaler)
    scaler = {state.scaler->scale, state.scaler->growthTracker};
  return {{"step", state.step},
          {"samples", state.samples},
          {"updates", state.updates},
          {"seed", state.seed},
          {"data", state.data},
          {"plan", state.plan},
          {"scaler", scaler},
          {"world_size", state.worldSize},
          {"environment", state.environment}};
}

RunState parseRun(const std::string &place, const json &value) {
  try {
    RunState state;
    auto count = [&](const char *key) {
      const json &number = value.at(key);
      if (!number.is_number_integer() || number < 0)
        throw InputError(place + ": " + kRun + ": \"" + key +
                         "\": expected a whole number from 0, got " +
                         number.dump());
      return number.get<int64_t>();
    };
    state.step = count("step");
    state.samples = count("samples");
    state.updates = count("updates");
    state.worldSize = count("world_size");
    state.seed = value.at("seed").get<uint64_t>();
    state.data = value.at("data").get<std::string>();
    state.plan = value.at("plan").get<std::string>();
    value.at("environment").get_to(state.environment);
    if (const json &scaler = value.at("scaler"); !scaler.is_null())
      state.scaler = {scaler.at(0).get<double>(), scaler.at(1).get<int64_t>()};
    return state;
  } catch (const json::exception &error) {
    throw InputError(place + ": " + kRun + ": " + error.what());
  }
}

/// Each parameter's group, 0 for those that are not updated.
std::vector<size_t> groupsOf(const plan::Plan &plan) {
  std::vector<size_t> groups(plan.params.size(), 0);
  for (const plan::Instruction &instruction : plan.instructions)
    if (const auto *step = std::get_if<plan::OptimizerStep>(&instruction.kind))
      for (size_t i = 0; i < step->groups.size(); ++i)
        groups[size_t(step->params[i])] = size_t(step->groups[i]);
  return groups;
}

/// The options of one group, by torch.optim's names.
std::map<std::string, json> optionsOf(const plan::Optimizer &o, double factor) {
  std::map<std::string, json> options = {{"lr", o.lr * factor},
                                         {"initial_lr", o.lr},
                                         {"weight_decay", o.weightDecay},
                                         {"maximize", o.maximize},
                                         {"foreach", nullptr},
                                         {"differentiable", false},
                                         {"fused", nullptr}};
  if (o.fused)
    options["fused"] = true;
  if (o.foreach)
    options["foreach"] = true;
  if (o.name == "sgd") {
    options["momentum"] = o.momentum;
    options["dampening"] = o.dampening;
    options["nesterov"] = o.nesterov;
  } else {
    options["betas"] = {o.beta1, o.beta2};
    options["eps"] = o.eps;
    options["amsgrad"] = o.amsgrad;
    options["capturable"] = false;
    options["decoupled_weight_decay"] = o.name == "adamw";
  }
  return options;
}

/// The tensors of a parameter's state, by torch.optim's names.
std::vector<std::string> statesOf(const std::string &place,
                                  const plan::Optimizer &o) {
  if (o.name == "sgd")
    return o.momentum != 0 ? std::vector<std::string>{"momentum_buffer"}
                           : std::vector<std::string>();
  if (o.name != "adam" && o.name != "adamw")
    throw InputError(
        place + ": the plan's optimizer \"" + o.name +
        "\" is not one of PyTorch's: expected a checkpoint with the "
        "native form's own values");
  std::vector<std::string> names = {"exp_avg", "exp_avg_sq", "step"};
  if (o.amsgrad)
    names.push_back("max_exp_avg_sq");
  return names;
}

} // namespace

bool isNative(const std::string &folder) {
  std::error_code error;
  return fs::exists(fs::path(folder) / kManifestName, error);
}

std::map<std::string, json> torchOptions(const plan::Plan &plan, int64_t step) {
  std::map<std::string, json> values;
  std::vector<plan::Optimizer> settings = plan.optimizerGroups();
  std::vector<size_t> groups = groupsOf(plan);
  double factor = plan.lrSchedule ? plan.lrSchedule->factor(step) : 1;
  for (size_t p = 0; p < plan.params.size(); ++p) {
    const plan::Optimizer &o = settings[groups[p]];
    if (o.isPlugin() || o.isExternal())
      continue;
    std::vector<std::string> names = plan.params[p].aliases;
    names.push_back(plan.params[p].name);
    for (const auto &[option, value] : optionsOf(o, factor))
      for (const std::string &name : names)
        values[std::string(kGroups) + name + "." + option] = value;
  }
  return values;
}

SavedState readNative(const std::string &folder, const plan::Plan *plan) {
  NativeCheckpoint checkpoint(folder);
  const Manifest &manifest = checkpoint.manifest();
  for (size_t file = 0; file < manifest.files.size(); ++file)
    checkpoint.verify(file);
  SavedState state = checkpoint.state();
  for (const auto &[alias, name] : manifest.aliases) {
    auto tensor = state.tensors.find(name);
    if (tensor == state.tensors.end())
      throw InputError(folder + ": no tensor \"" + name + "\", which \"" +
                       alias + "\" is");
    SavedTensor same = tensor->second;
    state.tensors.emplace(alias, std::move(same));
  }
  state.values[kRun] = printRun(manifest.state);
  state.values[kStep] = manifest.state.step;
  state.values[kEpoch] = manifest.state.step;
  if (!plan)
    return state;
  for (const plan::Param &param : plan->params)
    if (auto tensor = state.tensors.find(param.name);
        tensor == state.tensors.end() || tensor->second.spec != param.spec)
      throw InputError(folder + ": expected the plan's parameter \"" +
                       param.name + "\", " + describe(param.spec) +
                       (tensor == state.tensors.end()
                            ? ""
                            : ", got " + describe(tensor->second.spec)));
  for (auto &[name, value] : torchOptions(*plan, manifest.state.step))
    state.values[name] = std::move(value);
  return state;
}

namespace {

/// Chooses what of a checkpoint a run with the plan goes on from.
class Choice {
public:
  Choice(const std::string &place, const SavedState &state,
         const plan::Plan &plan, const std::string &planPath)
      : place(place), state(state), plan(plan), planPath(planPath) {}

  std::map<std::string, SavedTensor> tensors;
  std::map<std::string, std::string> aliases;
  std::vector<std::string> remarks;

  void choose() {
    std::vector<plan::Optimizer> settings = plan.optimizerGroups();
    std::vector<size_t> groups = groupsOf(plan);
    for (size_t p = 0; p < plan.params.size(); ++p)
      chooseParam(plan.params[p], settings[groups[p]]);
    for (const plan::Buffer &buffer : plan.buffers)
      chooseBuffer(buffer);
    for (const auto &[name, tensor] : state.tensors) {
      // A rank's own tensor, from one of our runs.
      if (isOwnName(name) && state.values.contains(kRun))
        tensors[name] = tensor;
      else if (!used.contains(name))
        remarks.push_back("left out: " + name);
    }
  }

  /// The number in a value, or in a tensor of one integer.
  std::optional<int64_t> number(const std::string &name) {
    if (auto value = state.values.find(name); value != state.values.end())
      return value->second.is_number_integer()
                 ? std::optional(value->second.get<int64_t>())
                 : std::nullopt;
    auto tensor = state.tensors.find(name);
    if (tensor == state.tensors.end() || tensor->second.spec.numElements() != 1)
      return std::nullopt;
    const plan::TensorSpec &spec = tensor->second.spec;
    for (const ChunkData &chunk : tensor->second.chunks)
      if (!chunk.data.empty()) {
        used.insert(name);
        int32_t narrow = 0;
        int64_t wide = 0;
        float real = 0;
        if (spec.dtype == plan::DType::Int32)
          return std::memcpy(&narrow, chunk.data.data(), 4), narrow;
        if (spec.dtype == plan::DType::Int64)
          return std::memcpy(&wide, chunk.data.data(), 8), wide;
        if (spec.dtype == plan::DType::Float32)
          return std::memcpy(&real, chunk.data.data(), 4), int64_t(real);
      }
    return std::nullopt;
  }

  [[noreturn]] void fail(const std::string &message) const {
    throw InputError(place + ": " + message);
  }

private:
  void take(const std::string &name, const std::string &from,
            const plan::TensorSpec &spec) {
    auto tensor = state.tensors.find(from);
    if (tensor == state.tensors.end())
      fail("no tensor \"" + from + "\", which the plan needs");
    if (tensor->second.spec != spec)
      fail("tensor \"" + from + "\": expected " + describe(spec) +
           ", as the plan has it, got " + describe(tensor->second.spec));
    used.insert(from);
    tensors[name] = tensor->second;
  }

  void chooseParam(const plan::Param &param, const plan::Optimizer &settings) {
    std::string from = param.name;
    for (const std::string &alias : param.aliases) {
      aliases[alias] = param.name;
      used.insert(alias);
      if (!state.tensors.contains(from))
        from = alias;
    }
    take(param.name, from, param.spec);
    if (settings.isPlugin() || settings.isExternal() || !param.requiresGrad ||
        param.unused) {
      // As they are, if the run was ours.
      std::string prefix = std::string(kState) + param.name + ".";
      for (auto it = state.tensors.lower_bound(prefix);
           it != state.tensors.end() && it->first.starts_with(prefix); ++it)
        if (state.values.contains(kRun)) {
          used.insert(it->first);
          tensors.insert(*it);
        }
      return;
    }
    for (const std::string &name : statesOf(place, settings)) {
      plan::TensorSpec spec = param.spec;
      if (name == "step")
        spec = {{}, plan::DType::Float32};
      take(std::string(kState) + param.name + "." + name,
           std::string(kState) + from + "." + name, spec);
    }
  }

  void chooseBuffer(const plan::Buffer &buffer) {
    if (buffer.persistent || state.tensors.contains(buffer.name))
      return take(buffer.name, buffer.name, buffer.spec);
    if (!weights) {
      if (plan.weights.path.empty())
        fail("no tensor \"" + buffer.name +
             "\", a buffer of the plan, which has no weights");
      weights = std::make_shared<WeightFiles>(
          (fs::path(planPath).parent_path() / plan.weights.path).string());
    }
    for (const SafeTensors &file : weights->opened())
      if (auto entry = file.entries().find(buffer.name);
          entry != file.entries().end() && entry->second.spec == buffer.spec) {
        Chunk whole{std::vector<int64_t>(buffer.spec.shape.size(), 0),
                    buffer.spec.shape};
        tensors[buffer.name] = {buffer.spec,
                                {{whole, entry->second.data, file.path()}}};
        return;
      }
    throw InputError(weights->path() + ": no buffer \"" + buffer.name + "\"");
  }

  const std::string &place;
  const SavedState &state;
  const plan::Plan &plan;
  const std::string &planPath;
  std::set<std::string> used;
  std::shared_ptr<WeightFiles> weights;
};

/// Differences of the optimizer's options, an option a line.
void compareOptions(const SavedState &state, const plan::Plan &plan,
                    int64_t step, std::vector<std::string> &remarks) {
  std::set<std::string> said;
  for (const auto &[name, ours] : torchOptions(plan, step)) {
    auto value = state.values.find(name);
    std::string option = name.substr(name.rfind('.') + 1);
    // These change how the update is computed, at most its rounding.
    if (value == state.values.end() || value->second == ours ||
        option == "foreach" || option == "fused" || option == "capturable" ||
        !said.insert(option).second)
      continue;
    remarks.push_back(name + " was " + value->second.dump() +
                      "; the plan has " + ours.dump());
  }
}

RunState startOf(const std::string &place, Choice &choice,
                 const SavedState &state, const plan::Plan &plan,
                 const NativeStart &start) {
  if (auto run = state.values.find(kRun); run != state.values.end())
    return parseRun(place, run->second);
  std::optional<int64_t> step = choice.number(kStep);
  if (!step)
    step = choice.number(kEpoch);
  if (!step || *step < 0)
    choice.fail(std::string("expected \"") + kStep + "\" or \"" + kEpoch +
                "\", a whole number of steps");
  RunState run;
  run.step = run.updates = *step;
  run.seed = start.seed;
  // No world size, so that the generators start anew at any.
  run.worldSize = 0;
  int64_t each = samplesPerMicrobatch(plan) * plan.accumulationSteps;
  if (start.samples)
    run.samples = *start.samples;
  else if (__builtin_mul_overflow(each, *step, &run.samples))
    choice.fail("too many steps: " + std::to_string(*step));
  choice.remarks.push_back(
      "assumed: " + std::to_string(run.samples) + " samples were taken, seed " +
      std::to_string(run.seed) + ", and new random generators");
  for (const plan::Param &param : plan.params)
    if (auto updates =
            choice.number(std::string(kState) + param.name + ".step")) {
      run.updates = *updates;
      break;
    }
  if (plan.gradScaler) {
    run.scaler = {plan.gradScaler->initScale, 0};
    choice.remarks.push_back("assumed: a new loss scaler");
  }
  return run;
}

bool isPlain(const json &value) {
  if (value.is_binary() ||
      (value.is_number_float() && !std::isfinite(value.get<double>())))
    return false;
  return !value.is_structured() ||
         std::all_of(value.begin(), value.end(), isPlain);
}

} // namespace

std::vector<std::string>
writeNative(const std::string &folder, const std::string &from,
            const SavedState &state, const plan::Plan &plan,
            const std::string &planPath, const NativeStart &start) {
  Choice choice(from, state, plan, planPath);
  Manifest manifest;
  manifest.state = startOf(from, choice, state, plan, start);
  choice.choose();
  compareOptions(state, plan, manifest.state.step, choice.remarks);
  for (const auto &[name, value] : state.values) {
    if (name == kRun || name == kStep || name == kEpoch ||
        name.starts_with(kGroups))
      continue;
    if (isPlain(value))
      manifest.values[name] = value;
    else
      choice.remarks.push_back("left out: " + name);
  }
  manifest.attempt = newAttempt();
  manifest.aliases = choice.aliases;

  // A file has one chunk of each tensor.
  std::vector<std::vector<ShardTensor>> files(1);
  uint64_t bytes = 1 << 20;
  for (const auto &[name, tensor] : choice.tensors) {
    manifest.tensors[name] = tensor.spec;
    for (size_t i = 0; i < tensor.chunks.size(); ++i) {
      if (i == files.size())
        files.emplace_back();
      const ChunkData &chunk = tensor.chunks[i];
      files[i].push_back({name, tensor.spec, chunk.chunk, chunk.data});
      bytes += chunk.data.size() + 1024;
    }
  }
  Position position;
  Progress progress(0, position, std::nullopt);
  CheckpointFolder checkpoints(folder);
  checkpoints.open();
  if (std::error_code error;
      fs::exists(checkpoints.pathOf(manifest.state.step), error))
    throw InputError(checkpoints.pathOf(manifest.state.step) +
                     ": cannot write: it already exists");
  std::string place = checkpoints.begin(manifest.attempt, bytes);
  try {
    for (size_t i = 0; i < files.size(); ++i)
      manifest.files.push_back(writeShardFile(
          place, int64_t(i), manifest.attempt, files[i], progress, {}));
    std::string text = printManifest(manifest);
    // Values come from elsewhere: a reader may refuse some.
    parseManifest(text, checkpoints.pathOf(manifest.state.step));
    DurableFile file(place + "/" + kManifestName, progress);
    file.write(text);
    file.finish();
    syncFolder(place);
    checkpoints.commit(manifest.attempt, manifest.state.step, progress);
  } catch (...) {
    checkpoints.abandon(manifest.attempt);
    throw;
  }
  return choice.remarks;
}

} // namespace fsdp::runtime
