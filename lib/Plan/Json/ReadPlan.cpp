//===- ReadPlan.cpp - bounded, strict reading of plan JSON ----------------===//
//
// The tree of JSON is decoded key by key, so that unknown and missing keys are
// errors that name their JSON path.
//
//===----------------------------------------------------------------------===//
#include "JsonCursor.h"
#include "fsdp/Plan/Digest.h"
#include "fsdp/Plan/Limits.h"
#include "fsdp/Support/Files.h"

namespace fsdp::plan {

namespace {

DType decodeDType(const Cursor &c) {
  auto dtype = parseDType(c.string());
  if (!dtype)
    c.error("expected a dtype, got \"" + c.string() + "\"");
  return *dtype;
}

TensorSpec decodeSpec(const Cursor &c) {
  TensorSpec spec;
  int64_t bytes = 1;
  spec.shape = c.at("shape").list([&](const Cursor &extent) {
    int64_t value = extent.integer(0);
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(value, 1), &bytes))
      extent.error("tensor too large");
    return value;
  });
  spec.dtype = decodeDType(c.at("dtype"));
  if (__builtin_mul_overflow(bytes, byteWidth(spec.dtype), &bytes))
    c.at("shape").error("tensor too large");
  return spec;
}

Strides decodeStrides(const Cursor &c) {
  if (!c.has("strides"))
    return {};
  return c.at("strides").list(
      [](const Cursor &stride) { return stride.integer(0); });
}

Arg decodeArg(const Cursor &c) {
  const Json &node = c.json();
  if (node.is_null())
    return {NoneArg{}};
  if (node.is_boolean())
    return {c.boolean()};
  if (node.is_number_integer())
    return {c.integer()};
  if (node.is_number_float())
    return {c.real()};
  if (node.is_string())
    return {c.string()};
  if (node.is_array())
    return {c.list(decodeArg)};
  if (c.has("t")) {
    c.keys({"t"});
    return {TensorArg{c.at("t").index()}};
  }
  if (c.has("device")) {
    c.keys({"device"});
    if (!c.at("device").boolean())
      c.at("device").error("expected true, got false");
    return {DeviceArg{}};
  }
  if (c.has("c")) {
    c.keys({"c"});
    auto parts = c.at("c").list([](const Cursor &part) { return part.real(); });
    if (parts.size() != 2)
      c.at("c").error("expected a real and an imaginary part, got " +
                      std::to_string(parts.size()) + " numbers");
    return {std::complex<double>(parts[0], parts[1])};
  }
  return {c.real()};
}

std::string decodeHex(const Cursor &c) {
  const std::string &text = c.string();
  if (text.size() % 2)
    c.error("expected an even number of hex digits, got " +
            std::to_string(text.size()));
  auto digit = [&](char ch) -> int {
    if (ch >= '0' && ch <= '9')
      return ch - '0';
    if (ch >= 'a' && ch <= 'f')
      return ch - 'a' + 10;
    c.error("expected lower-case hex digits, got " + Json(text).dump());
  };
  std::string bytes(text.size() / 2, '\0');
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = char(digit(text[2 * i]) << 4 | digit(text[2 * i + 1]));
  return bytes;
}

Call decodeCall(const Cursor &c) {
  Call call;
  const std::string &name = c.at("call").string();
  size_t dot = name.find('.');
  call.op = name.substr(0, dot);
  if (dot != std::string::npos)
    call.overload = name.substr(dot + 1);
  if (call.op.find("::") == std::string::npos ||
      (dot != std::string::npos && call.overload.empty()))
    c.at("call").error("expected namespace::name[.overload], got \"" + name +
                       "\"");
  call.args = c.at("args").list(decodeArg);
  call.outs = c.at("outs").indices();
  if (c.has("reduce_input_of"))
    call.reduceInputOf = c.at("reduce_input_of").index();
  if (c.has("mutates"))
    call.mutates = c.at("mutates").indices();
  if (c.has("recompute"))
    call.recompute = c.at("recompute").boolean();
  if (c.has("schema"))
    call.schema = c.at("schema").string();
  return call;
}

ReduceScatter decodeReduceScatter(const Cursor &c) {
  ReduceScatter reduce{c.at("reduce_scatter").index(), c.at("params").indices(),
                       c.at("ins").indices(), c.at("outs").indices(),
                       c.has("last_microbatch") &&
                           c.at("last_microbatch").boolean()};
  if (c.has("reduce_dtype"))
    reduce.reduceDtype = decodeDType(c.at("reduce_dtype"));
  if (c.has("predivide") || c.has("postdivide") || c.has("premultiply"))
    reduce.divisors = {c.at("predivide").real(), c.at("postdivide").real(),
                       c.has("premultiply") ? c.at("premultiply").real() : 1};
  return reduce;
}

Phase decodePhase(const Cursor &c) {
  const std::string &phase = c.at("phase").string();
  if (phase == "forward")
    return Phase::Forward;
  if (phase == "backward")
    return Phase::Backward;
  if (phase == "optimizer")
    return Phase::Optimizer;
  c.at("phase").error("expected a phase, got \"" + phase + "\"");
}

Stream decodeStream(const Cursor &c) {
  for (size_t i = 0; i < kNumStreams; ++i)
    if (c.string() == streamName(Stream(i)))
      return Stream(i);
  c.error("expected a stream, got \"" + c.string() + "\"");
}

/// Instructions of the step have a phase, others none.
Instruction decodeInstruction(const Cursor &c, bool hasPhase) {
  Instruction instruction;
  if (!c.isObject())
    c.expected("an object");
  auto keys = [&](std::initializer_list<const char *> required,
                  std::initializer_list<const char *> optional = {}) {
    c.keys(required, optional,
           {"phase", "module", "line", "frees", "stream", "waits", "records",
            "buffer", "why"});
  };
  if (c.has("call")) {
    keys({"call", "args", "outs"},
         {"reduce_input_of", "mutates", "recompute", "schema"});
    instruction.kind = decodeCall(c);
  } else if (c.has("read_buffer")) {
    keys({"read_buffer", "out"});
    instruction.kind =
        ReadBuffer{c.at("read_buffer").index(), c.at("out").index()};
  } else if (c.has("constant")) {
    keys({"constant", "out"});
    instruction.kind =
        Constant{decodeHex(c.at("constant")), c.at("out").index()};
  } else if (c.has("all_gather")) {
    keys({"all_gather", "outs"}, {"group", "first_microbatch", "source"});
    instruction.kind = AllGather{
        c.at("all_gather").index(), c.at("outs").indices(),
        c.has("group") ? c.at("group").integer(1, 1 << 20) : 0,
        c.has("first_microbatch") && c.at("first_microbatch").boolean(),
        c.has("source") ? c.at("source").index() : -1};
  } else if (c.has("reshard")) {
    keys({"reshard"}, {"keep", "last_microbatch"});
    instruction.kind =
        Reshard{c.at("reshard").index(),
                c.has("keep") ? c.at("keep").integer(1, 1 << 20) : 0,
                c.has("last_microbatch") && c.at("last_microbatch").boolean()};
  } else if (c.has("reduce_scatter")) {
    keys({"reduce_scatter", "params", "ins", "outs"},
         {"last_microbatch", "reduce_dtype", "predivide", "postdivide",
          "premultiply"});
    instruction.kind = decodeReduceScatter(c);
  } else if (c.has("accumulate")) {
    keys({"accumulate", "ins", "outs"});
    instruction.kind =
        Accumulate{c.at("accumulate").indices(), c.at("ins").indices(),
                   c.at("outs").indices()};
  } else if (c.has("clip_grad_norm")) {
    keys({"clip_grad_norm", "ins", "outs", "max_norm", "norm_type"});
    instruction.kind =
        ClipGradNorm{c.at("clip_grad_norm").indices(), c.at("ins").indices(),
                     c.at("outs").indices(), c.at("max_norm").real(),
                     c.at("norm_type").real()};
  } else if (c.has("loss_scale")) {
    keys({"loss_scale"});
    instruction.kind = LossScale{c.at("loss_scale").index()};
  } else if (c.has("unscale")) {
    keys({"unscale", "ins", "outs"}, {"deferred"});
    instruction.kind = Unscale{c.at("unscale").indices(), c.at("ins").indices(),
                               c.at("outs").indices(),
                               c.has("deferred") && c.at("deferred").boolean()};
  } else if (c.has("all_reduce")) {
    keys({"all_reduce", "params", "ins", "outs"},
         {"postdivide", "last_microbatch"});
    AllReduce reduce{c.at("all_reduce").index(), c.at("params").indices(),
                     c.at("ins").indices(), c.at("outs").indices()};
    if (c.has("postdivide"))
      reduce.postdivide = c.at("postdivide").real();
    reduce.lastMicrobatch =
        c.has("last_microbatch") && c.at("last_microbatch").boolean();
    instruction.kind = std::move(reduce);
  } else if (c.has("copy_to_device")) {
    keys({"copy_to_device"});
    instruction.kind = CopyToDevice{c.at("copy_to_device").index()};
  } else if (c.has("copy_to_host")) {
    keys({"copy_to_host", "params", "ins", "outs"}, {"last_microbatch"});
    instruction.kind = CopyToHost{
        c.at("copy_to_host").index(), c.at("params").indices(),
        c.at("ins").indices(), c.at("outs").indices(),
        c.has("last_microbatch") && c.at("last_microbatch").boolean()};
  } else if (c.has("offload_activation")) {
    keys({"offload_activation", "out"});
    instruction.kind = OffloadActivation{c.at("offload_activation").indices(),
                                         c.at("out").index()};
  } else if (c.has("reload_activation")) {
    keys({"reload_activation", "outs"});
    instruction.kind = ReloadActivation{c.at("reload_activation").index(),
                                        c.at("outs").indices()};
  } else if (c.has("read_param")) {
    keys({"read_param", "out"});
    instruction.kind =
        ReadParam{c.at("read_param").index(), c.at("out").index()};
  } else if (c.has("optimizer_step")) {
    keys({"optimizer_step", "grads"}, {"groups"});
    instruction.kind = OptimizerStep{
        c.at("optimizer_step").indices(), c.at("grads").indices(),
        c.has("groups") ? c.at("groups").indices() : std::vector<int32_t>()};
  } else if (c.has("write_param")) {
    keys({"write_param", "value"});
    instruction.kind =
        WriteParam{c.at("write_param").index(), c.at("value").index()};
  } else if (c.has("write_buffer")) {
    keys({"write_buffer", "value"});
    instruction.kind =
        WriteBuffer{c.at("write_buffer").index(), c.at("value").index()};
  } else if (c.has("wait")) {
    c.keys({"wait"}, {"phase", "module", "frees", "records"});
    instruction.kind = Wait{};
    instruction.waits = c.at("wait").indices();
  } else {
    c.error("expected an instruction (call, read_buffer, read_param, constant, "
            "all_gather, reshard, reduce_scatter, all_reduce, copy_to_device, "
            "copy_to_host, offload_activation, reload_activation, accumulate, "
            "loss_scale, unscale, clip_grad_norm, optimizer_step, wait, "
            "write_param or write_buffer)");
  }
  if (hasPhase)
    instruction.phase = decodePhase(c);
  else if (c.has("phase"))
    c.error("unknown key \"phase\"");
  if (c.has("module"))
    instruction.module = c.at("module").index();
  if (c.has("line"))
    instruction.line = c.at("line").index();
  if (c.has("frees"))
    instruction.frees = c.at("frees").indices();
  if (c.has("stream"))
    instruction.stream = decodeStream(c.at("stream"));
  if (c.has("waits"))
    instruction.waits = c.at("waits").indices();
  if (c.has("records"))
    instruction.records = c.at("records").index();
  if (c.has("buffer"))
    instruction.buffer = c.at("buffer").index();
  if (c.has("why")) {
    instruction.why = c.at("why").string();
    if (instruction.why.empty())
      c.at("why").error("expected a text, got \"\"");
  }
  return instruction;
}

Optimizer decodeOptimizer(const Cursor &c) {
  c.keys({"name", "lr", "beta1", "beta2", "eps", "weight_decay", "momentum",
          "dampening", "nesterov", "amsgrad", "maximize", "fused", "library",
          "options"});
  Optimizer o;
  o.name = c.at("name").string();
  o.lr = c.at("lr").real();
  o.beta1 = c.at("beta1").real();
  o.beta2 = c.at("beta2").real();
  o.eps = c.at("eps").real();
  o.weightDecay = c.at("weight_decay").real();
  o.momentum = c.at("momentum").real();
  o.dampening = c.at("dampening").real();
  o.nesterov = c.at("nesterov").boolean();
  o.amsgrad = c.at("amsgrad").boolean();
  o.maximize = c.at("maximize").boolean();
  o.fused = c.at("fused").boolean();
  o.library = c.at("library").string();
  c.at("options").members([&](const std::string &name, const Cursor &value) {
    o.options[name] = value.real();
  });
  return o;
}

LRSchedule decodeLRSchedule(const Cursor &c) {
  c.keys({"warmup_steps", "decay", "total_steps", "min_lr_ratio"});
  LRSchedule schedule;
  schedule.warmupSteps = c.at("warmup_steps").integer(0);
  schedule.decay = c.at("decay").string();
  schedule.totalSteps = c.at("total_steps").integer(1);
  schedule.minLRRatio = c.at("min_lr_ratio").real();
  return schedule;
}

GradScaler decodeGradScaler(const Cursor &c) {
  c.keys({"init_scale", "growth_factor", "backoff_factor", "growth_interval"});
  return {c.at("init_scale").real(), c.at("growth_factor").real(),
          c.at("backoff_factor").real(), c.at("growth_interval").integer(1)};
}

Arena decodeArena(const Cursor &c) {
  c.keys({"bytes", "lower_bound"});
  return {c.at("bytes").integer(0), c.at("lower_bound").integer(0)};
}

Plan decodePlan(const Cursor &c) {
  // The version comes first: a plan of another version has other keys.
  if (int64_t version = c.at("version").integer(); version != kPlanVersion)
    c.at("version").error("expected plan version " +
                          std::to_string(kPlanVersion) + ", got " +
                          std::to_string(version) +
                          "; compile the model again with this fsdp-opt");
  c.keys({"version",
          "producer",
          "model",
          "world_size",
          "replicas",
          "weights",
          "optimizer",
          "param_groups",
          "lr_schedule",
          "grad_scaler",
          "accumulation_steps",
          "modules",
          "values",
          "arena",
          "params",
          "buffers",
          "inputs",
          "units",
          "init",
          "evaluation",
          "evaluation_loss",
          "instructions",
          "loss"},
         {"memory_budget", "host_arena", "lines", "digest"});
  Plan plan;
  plan.producer = c.at("producer").string();
  plan.model = c.at("model").string();
  plan.worldSize = c.at("world_size").integer(1, kMaxWorldSize);
  plan.replicas = c.at("replicas").integer(1, kMaxWorldSize);
  Cursor weights = c.at("weights");
  weights.keys({"path", "hash"});
  plan.weights = {weights.at("path").string(), weights.at("hash").string()};
  plan.optimizer = decodeOptimizer(c.at("optimizer"));
  plan.paramGroups = c.at("param_groups").list(decodeOptimizer);
  if (!c.at("lr_schedule").json().is_null())
    plan.lrSchedule = decodeLRSchedule(c.at("lr_schedule"));
  if (!c.at("grad_scaler").json().is_null())
    plan.gradScaler = decodeGradScaler(c.at("grad_scaler"));
  plan.accumulationSteps =
      c.at("accumulation_steps").integer(1, kMaxAccumulationSteps);
  plan.modules =
      c.at("modules").list([](const Cursor &m) { return m.string(); });
  if (c.has("lines"))
    plan.lines =
        c.at("lines").list([](const Cursor &line) { return line.string(); });
  plan.values = c.at("values").list([](const Cursor &v) {
    v.keys({"shape", "dtype"}, {"storage", "offset", "strides"});
    Value value = decodeSpec(v);
    if (v.has("storage"))
      value.storage = v.at("storage").index();
    if (v.has("offset"))
      value.offset = v.at("offset").integer(0);
    value.strides = decodeStrides(v);
    return value;
  });
  if (const Cursor arena = c.at("arena"); !arena.json().is_null())
    plan.arena = decodeArena(arena);
  if (c.has("host_arena"))
    plan.hostArena = decodeArena(c.at("host_arena"));
  if (c.has("memory_budget"))
    plan.memoryBudget = c.at("memory_budget").integer(1);
  plan.params = c.at("params").list([](const Cursor &p) {
    p.keys({"name", "aliases", "shape", "dtype", "unit", "requires_grad"},
           {"compute_dtype", "grad_dtype", "shard_dim", "unused"});
    Param param{p.at("name").string(),
                p.at("aliases").list(
                    [](const Cursor &a) -> std::string { return a.string(); }),
                decodeSpec(p), p.at("unit").index(),
                p.at("requires_grad").boolean()};
    if (p.has("compute_dtype"))
      param.computeDtype = decodeDType(p.at("compute_dtype"));
    if (p.has("grad_dtype"))
      param.gradDtype = decodeDType(p.at("grad_dtype"));
    if (p.has("shard_dim"))
      param.shardDim = p.at("shard_dim").index();
    param.unused = p.has("unused") && p.at("unused").boolean();
    return param;
  });
  plan.buffers = c.at("buffers").list([](const Cursor &b) {
    b.keys({"name", "shape", "dtype", "persistent"}, {"strides"});
    return Buffer{b.at("name").string(), decodeSpec(b),
                  b.at("persistent").boolean(), decodeStrides(b)};
  });
  plan.inputs = c.at("inputs").list([](const Cursor &i) {
    i.keys({"name", "shape", "dtype", "value", "low", "high"}, {"strides"});
    return Input{i.at("name").string(),  decodeSpec(i),
                 i.at("value").index(),  i.at("low").integer(),
                 i.at("high").integer(), decodeStrides(i)};
  });
  plan.units = c.at("units").list([](const Cursor &u) {
    u.keys({"name", "params", "reshard_after_forward", "cpu_offload"});
    return Unit{u.at("name").string(), u.at("params").indices(),
                u.at("reshard_after_forward").boolean(),
                u.at("cpu_offload").boolean()};
  });
  plan.init = c.at("init").list(
      [](const Cursor &i) { return decodeInstruction(i, /*hasPhase=*/false); });
  plan.evaluation = c.at("evaluation").list([](const Cursor &i) {
    return decodeInstruction(i, /*hasPhase=*/false);
  });
  plan.evaluationLoss = c.at("evaluation_loss").index();
  plan.instructions = c.at("instructions").list([](const Cursor &i) {
    return decodeInstruction(i, /*hasPhase=*/true);
  });
  plan.loss = c.at("loss").index();
  return plan;
}

/// That the plan is the one that was written. One that was changed on purpose
/// has no digest.
void verifyDigest(const Cursor &c, const Plan &plan) {
  if (!c.has("digest"))
    return;
  const std::string &given = c.at("digest").string();
  if (std::string digest = digestOf(plan); given != digest)
    c.at("digest").error("expected \"" + digest + "\", got \"" + given +
                         "\": the plan is not the one that was written");
}

} // namespace

Plan parsePlan(std::string_view json, const std::string &origin) {
  if (json.size() > kMaxJsonBytes)
    throw PlanError(origin + ": expected at most " +
                    std::to_string(kMaxJsonBytes) + " bytes, got " +
                    std::to_string(json.size()));
  Json tree = parseJson(json, origin);
  Plan plan = decodePlan(Cursor(tree, origin));
  verifyPlan(plan, origin);
  verifyDigest(Cursor(tree, origin), plan);
  return plan;
}

Plan readPlan(const std::string &path) {
  std::string text;
  if (std::string error = readFile(path, kMaxJsonBytes, text); !error.empty())
    throw PlanError(path + ": " + error);
  return parsePlan(text, path);
}

} // namespace fsdp::plan
