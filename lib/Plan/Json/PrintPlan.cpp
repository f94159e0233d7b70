//===- PrintPlan.cpp - the JSON form of a plan ----------------------------===//
#include "fsdp/Plan/Digest.h"
#include "fsdp/Plan/Plan.h"
#include "fsdp/Support/Hash.h"

#include <nlohmann/json.hpp>

#include <array>
#include <charconv>
#include <cmath>
#include <utility>

namespace fsdp::plan {

namespace {

struct PrintedPlan {
  std::string text;
  std::string digest;
};

class Printer {
public:
  PrintedPlan print(const Plan &plan);

private:
  void raw(std::string_view text) { out.append(text); }
  void number(int64_t value) { out += std::to_string(value); }
  void boolean(bool value) { raw(value ? "true" : "false"); }
  void string(std::string_view text);
  void real(double value);
  void key(std::string_view name) {
    raw(", \"");
    raw(name);
    raw("\": ");
  }
  /// First key of an object.
  void open(std::string_view name) {
    raw("{\"");
    raw(name);
    raw("\": ");
  }
  template <typename List> void numbers(const List &list) {
    raw("[");
    for (size_t i = 0; i < list.size(); ++i) {
      if (i)
        raw(", ");
      number(list[i]);
    }
    raw("]");
  }
  void spec(const TensorSpec &spec) {
    numbers(spec.shape);
    key("dtype");
    string(dtypeName(spec.dtype));
  }
  /// An index or offset, where it is not -1.
  void optional(std::string_view name, int64_t value) {
    if (value == -1)
      return;
    key(name);
    number(value);
  }
  void strides(const Strides &strides) {
    if (strides.empty())
      return;
    key("strides");
    numbers(strides);
  }
  void arg(const Arg &arg);
  void args(const ArgList &list);
  void hex(std::string_view bytes);
  /// Instructions of the initialisation and the evaluation have no phase.
  void instruction(const Instruction &instruction, bool hasPhase);
  void optimizer(const Optimizer &o);
  template <typename List, typename Row>
  void table(std::string_view name, const List &list, Row &&row) {
    raw("  \"");
    raw(name);
    raw("\": [");
    for (size_t i = 0; i < list.size(); ++i) {
      raw(i ? ",\n    " : "\n    ");
      row(list[i]);
    }
    raw(list.empty() ? "],\n" : "\n  ],\n");
  }

  std::string out;
};

void Printer::string(std::string_view text) {
  try {
    out += nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception &) {
    throw PlanError("plan: expected utf-8 in names, got other bytes");
  }
}

void Printer::real(double value) {
  if (!std::isfinite(value)) {
    open("f");
    raw(std::isnan(value) ? "\"nan\"" : value < 0 ? "\"-inf\"" : "\"inf\"");
    raw("}");
    return;
  }
  std::array<char, 40> buffer;
  auto end =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
  std::string_view text(buffer.data(), end - buffer.data());
  raw(text);
  // A float must stay recognisable as one.
  if (text.find_first_of(".e") == std::string_view::npos)
    raw(".0");
}

void Printer::arg(const Arg &arg) {
  struct Visitor {
    Printer &p;
    void operator()(const NoneArg &) { p.raw("null"); }
    void operator()(const TensorArg &t) {
      p.open("t");
      p.number(t.value);
      p.raw("}");
    }
    void operator()(const DeviceArg &) { p.raw("{\"device\": true}"); }
    void operator()(bool v) { p.boolean(v); }
    void operator()(int64_t v) { p.number(v); }
    void operator()(double v) { p.real(v); }
    void operator()(std::complex<double> v) {
      p.open("c");
      p.raw("[");
      p.real(v.real());
      p.raw(", ");
      p.real(v.imag());
      p.raw("]}");
    }
    void operator()(const std::string &v) { p.string(v); }
    void operator()(const ArgList &v) { p.args(v); }
  };
  std::visit(Visitor{*this}, arg.value);
}

void Printer::args(const ArgList &list) {
  raw("[");
  for (size_t i = 0; i < list.size(); ++i) {
    if (i)
      raw(", ");
    arg(list[i]);
  }
  raw("]");
}

void Printer::hex(std::string_view bytes) {
  constexpr std::string_view digits = "0123456789abcdef";
  raw("\"");
  for (unsigned char byte : bytes) {
    out += digits[byte >> 4];
    out += digits[byte & 15];
  }
  raw("\"");
}

void Printer::instruction(const Instruction &instruction, bool hasPhase) {
  struct Visitor {
    Printer &p;
    const std::vector<EventId> &waits;
    void operator()(const Call &c) {
      p.open("call");
      p.string(c.overload.empty() ? c.op : c.op + "." + c.overload);
      p.key("args");
      p.args(c.args);
      p.key("outs");
      p.numbers(c.outs);
      p.optional("reduce_input_of", c.reduceInputOf);
      if (!c.mutates.empty()) {
        p.key("mutates");
        p.numbers(c.mutates);
      }
      if (c.recompute)
        p.raw(", \"recompute\": true");
      if (!c.schema.empty()) {
        p.key("schema");
        p.string(c.schema);
      }
    }
    void operator()(const ReadBuffer &r) {
      p.open("read_buffer");
      p.number(r.buffer);
      p.key("out");
      p.number(r.out);
    }
    void operator()(const Constant &c) {
      p.open("constant");
      p.hex(c.data);
      p.key("out");
      p.number(c.out);
    }
    void operator()(const AllGather &g) {
      p.open("all_gather");
      p.number(g.unit);
      p.key("outs");
      p.numbers(g.outs);
      if (g.group > 0) {
        p.key("group");
        p.number(g.group);
      }
      if (g.firstMicrobatch)
        p.raw(", \"first_microbatch\": true");
      p.optional("source", g.source);
    }
    void operator()(const Reshard &r) {
      p.open("reshard");
      p.number(r.unit);
      if (r.keep > 0) {
        p.key("keep");
        p.number(r.keep);
      }
      if (r.lastMicrobatch)
        p.raw(", \"last_microbatch\": true");
    }
    void operator()(const ReduceScatter &r) {
      p.open("reduce_scatter");
      p.number(r.unit);
      p.key("params");
      p.numbers(r.params);
      p.key("ins");
      p.numbers(r.ins);
      p.key("outs");
      p.numbers(r.outs);
      if (r.lastMicrobatch)
        p.raw(", \"last_microbatch\": true");
      if (r.reduceDtype) {
        p.key("reduce_dtype");
        p.string(dtypeName(*r.reduceDtype));
      }
      if (r.divisors) {
        p.key("predivide");
        p.real(r.divisors->predivide);
        p.key("postdivide");
        p.real(r.divisors->postdivide);
        if (r.divisors->premultiply != 1) {
          p.key("premultiply");
          p.real(r.divisors->premultiply);
        }
      }
    }
    void operator()(const Accumulate &a) {
      p.open("accumulate");
      p.numbers(a.params);
      p.key("ins");
      p.numbers(a.ins);
      p.key("outs");
      p.numbers(a.outs);
    }
    void operator()(const ClipGradNorm &c) {
      p.open("clip_grad_norm");
      p.numbers(c.params);
      p.key("ins");
      p.numbers(c.ins);
      p.key("outs");
      p.numbers(c.outs);
      p.key("max_norm");
      p.real(c.maxNorm);
      p.key("norm_type");
      p.real(c.normType);
    }
    void operator()(const LossScale &l) {
      p.open("loss_scale");
      p.number(l.out);
    }
    void operator()(const Unscale &u) {
      p.open("unscale");
      p.numbers(u.params);
      p.key("ins");
      p.numbers(u.ins);
      p.key("outs");
      p.numbers(u.outs);
      if (u.deferred)
        p.raw(", \"deferred\": true");
    }
    void operator()(const ReadParam &r) {
      p.open("read_param");
      p.number(r.param);
      p.key("out");
      p.number(r.out);
    }
    void operator()(const AllReduce &r) {
      p.open("all_reduce");
      p.number(r.unit);
      p.key("params");
      p.numbers(r.params);
      p.key("ins");
      p.numbers(r.ins);
      p.key("outs");
      p.numbers(r.outs);
      if (r.postdivide) {
        p.key("postdivide");
        p.real(*r.postdivide);
      }
      if (r.lastMicrobatch)
        p.raw(", \"last_microbatch\": true");
    }
    void operator()(const CopyToDevice &c) {
      p.open("copy_to_device");
      p.number(c.unit);
    }
    void operator()(const CopyToHost &c) {
      p.open("copy_to_host");
      p.number(c.unit);
      p.key("params");
      p.numbers(c.params);
      p.key("ins");
      p.numbers(c.ins);
      p.key("outs");
      p.numbers(c.outs);
      if (c.lastMicrobatch)
        p.raw(", \"last_microbatch\": true");
    }
    void operator()(const OffloadActivation &o) {
      p.open("offload_activation");
      p.numbers(o.ins);
      p.key("out");
      p.number(o.out);
    }
    void operator()(const ReloadActivation &r) {
      p.open("reload_activation");
      p.number(r.host);
      p.key("outs");
      p.numbers(r.outs);
    }
    void operator()(const OptimizerStep &o) {
      p.open("optimizer_step");
      p.numbers(o.params);
      p.key("grads");
      p.numbers(o.grads);
      if (!o.groups.empty()) {
        p.key("groups");
        p.numbers(o.groups);
      }
    }
    void operator()(const WriteParam &w) {
      p.open("write_param");
      p.number(w.param);
      p.key("value");
      p.number(w.value);
    }
    void operator()(const WriteBuffer &w) {
      p.open("write_buffer");
      p.number(w.buffer);
      p.key("value");
      p.number(w.value);
    }
    void operator()(const Wait &) {
      p.open("wait");
      p.numbers(waits);
    }
  };
  std::visit(Visitor{*this, instruction.waits}, instruction.kind);
  if (hasPhase) {
    key("phase");
    string(phaseName(instruction.phase));
  }
  optional("module", instruction.module);
  optional("line", instruction.line);
  if (instruction.stream != Stream::Compute) {
    key("stream");
    string(streamName(instruction.stream));
  }
  if (!instruction.waits.empty() &&
      !std::holds_alternative<Wait>(instruction.kind)) {
    key("waits");
    numbers(instruction.waits);
  }
  optional("records", instruction.records);
  optional("buffer", instruction.buffer);
  if (!instruction.frees.empty()) {
    key("frees");
    numbers(instruction.frees);
  }
  if (!instruction.why.empty()) {
    key("why");
    string(instruction.why);
  }
  raw("}");
}

void Printer::optimizer(const Optimizer &o) {
  open("name");
  string(o.name);
  for (auto [name, value] :
       {std::pair("lr", o.lr), std::pair("beta1", o.beta1),
        std::pair("beta2", o.beta2), std::pair("eps", o.eps),
        std::pair("weight_decay", o.weightDecay),
        std::pair("momentum", o.momentum),
        std::pair("dampening", o.dampening)}) {
    key(name);
    real(value);
  }
  for (auto [name, value] :
       {std::pair("nesterov", o.nesterov), std::pair("amsgrad", o.amsgrad),
        std::pair("maximize", o.maximize), std::pair("fused", o.fused)}) {
    key(name);
    boolean(value);
  }
  key("library");
  string(o.library);
  raw(", \"options\": {");
  bool firstOption = true;
  for (const auto &[name, value] : o.options) {
    if (!std::exchange(firstOption, false))
      raw(", ");
    string(name);
    raw(": ");
    real(value);
  }
  raw("}}");
}

PrintedPlan Printer::print(const Plan &plan) {
  raw("{\n  \"version\": ");
  number(plan.version);
  raw(",\n  \"producer\": ");
  string(plan.producer);
  raw(",\n  \"model\": ");
  string(plan.model);
  raw(",\n  \"world_size\": ");
  number(plan.worldSize);
  raw(",\n  \"replicas\": ");
  number(plan.replicas);
  raw(",\n  \"weights\": ");
  open("path");
  string(plan.weights.path);
  key("hash");
  string(plan.weights.hash);
  raw("},\n  \"optimizer\": ");
  optimizer(plan.optimizer);
  raw(",\n");
  table("param_groups", plan.paramGroups,
        [&](const Optimizer &o) { optimizer(o); });
  raw("  \"lr_schedule\": ");
  if (plan.lrSchedule) {
    open("warmup_steps");
    number(plan.lrSchedule->warmupSteps);
    key("decay");
    string(plan.lrSchedule->decay);
    key("total_steps");
    number(plan.lrSchedule->totalSteps);
    key("min_lr_ratio");
    real(plan.lrSchedule->minLRRatio);
    raw("}");
  } else {
    raw("null");
  }
  raw(",\n  \"grad_scaler\": ");
  if (plan.gradScaler) {
    open("init_scale");
    real(plan.gradScaler->initScale);
    key("growth_factor");
    real(plan.gradScaler->growthFactor);
    key("backoff_factor");
    real(plan.gradScaler->backoffFactor);
    key("growth_interval");
    number(plan.gradScaler->growthInterval);
    raw("}");
  } else {
    raw("null");
  }
  raw(",\n  \"accumulation_steps\": ");
  number(plan.accumulationSteps);
  raw(",\n");

  table("modules", plan.modules, [&](const std::string &m) { string(m); });
  if (!plan.lines.empty())
    table("lines", plan.lines, [&](const std::string &line) { string(line); });
  table("values", plan.values, [&](const Value &v) {
    open("shape");
    spec(v);
    optional("storage", v.storage);
    optional("offset", v.offset);
    strides(v.strides);
    raw("}");
  });
  auto arena = [&](const Arena &a) {
    open("bytes");
    number(a.bytes);
    key("lower_bound");
    number(a.lowerBound);
    raw("}");
  };
  raw("  \"arena\": ");
  if (plan.arena)
    arena(*plan.arena);
  else
    raw("null");
  if (plan.hostArena) {
    raw(",\n  \"host_arena\": ");
    arena(*plan.hostArena);
  }
  if (plan.memoryBudget) {
    raw(",\n  \"memory_budget\": ");
    number(*plan.memoryBudget);
  }
  raw(",\n");
  table("params", plan.params, [&](const Param &p) {
    open("name");
    string(p.name);
    key("aliases");
    raw("[");
    for (size_t i = 0; i < p.aliases.size(); ++i) {
      if (i)
        raw(", ");
      string(p.aliases[i]);
    }
    raw("]");
    key("shape");
    spec(p.spec);
    key("unit");
    number(p.unit);
    key("requires_grad");
    boolean(p.requiresGrad);
    if (p.computeDtype) {
      key("compute_dtype");
      string(dtypeName(*p.computeDtype));
    }
    if (p.gradDtype) {
      key("grad_dtype");
      string(dtypeName(*p.gradDtype));
    }
    if (p.shardDim != 0) {
      key("shard_dim");
      number(p.shardDim);
    }
    if (p.unused)
      raw(", \"unused\": true");
    raw("}");
  });
  table("buffers", plan.buffers, [&](const Buffer &b) {
    open("name");
    string(b.name);
    key("shape");
    spec(b.spec);
    key("persistent");
    boolean(b.persistent);
    strides(b.strides);
    raw("}");
  });
  table("inputs", plan.inputs, [&](const Input &i) {
    open("name");
    string(i.name);
    key("shape");
    spec(i.spec);
    key("value");
    number(i.value);
    key("low");
    number(i.low);
    key("high");
    number(i.high);
    strides(i.strides);
    raw("}");
  });
  table("units", plan.units, [&](const Unit &u) {
    open("name");
    string(u.name);
    key("params");
    numbers(u.params);
    key("reshard_after_forward");
    boolean(u.reshardAfterForward);
    key("cpu_offload");
    boolean(u.cpuOffload);
    raw("}");
  });
  table("init", plan.init,
        [&](const Instruction &i) { instruction(i, /*hasPhase=*/false); });
  table("evaluation", plan.evaluation,
        [&](const Instruction &i) { instruction(i, /*hasPhase=*/false); });
  raw("  \"evaluation_loss\": ");
  number(plan.evaluationLoss);
  raw(",\n");
  table("instructions", plan.instructions,
        [&](const Instruction &i) { instruction(i, /*hasPhase=*/true); });
  raw("  \"loss\": ");
  number(plan.loss);
  std::string digest = hashBytes(out);
  raw(",\n  \"digest\": ");
  string(digest);
  raw("\n}\n");
  return {std::move(out), std::move(digest)};
}

} // namespace

std::string printPlan(const Plan &plan) { return Printer().print(plan).text; }

std::string digestOf(const Plan &plan) { return Printer().print(plan).digest; }

} // namespace fsdp::plan
