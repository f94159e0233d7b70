// RUN: fsdp-opt --split-input-file --verify-diagnostics %s

// expected-error @below {{Captured-1: expected fsdp.captured_for on the module, with the strings device and torch, and of a GPU an arch such as sm_90, got: {device = "cuda"}}}
module attributes {fsdp.captured_for = {device = "cuda"}} {
}

// -----

// expected-error @below {{Captured-1: expected fsdp.captured_for on the module, with the strings device and torch, and of a GPU an arch such as sm_90, got: {arch = "hopper", device = "cuda", torch = "2.15.0"}}}
module attributes {fsdp.captured_for = {arch = "hopper", device = "cuda", torch = "2.15.0"}} {
}

// -----

module {
  // expected-error @below {{Captured-1: expected fsdp.captured_for on the module}}
  fsdp.unit @u {fsdp.captured_for = {device = "cpu", torch = "2.15.0"}}
}

// -----

// expected-error @below {{Level-1: expected fsdp.level on the module, an #fsdp.level, got: "sharded"}}
module attributes {fsdp.level = "sharded"} {
}

// -----

module {
  // expected-error @below {{Level-1: expected fsdp.level on the module, an #fsdp.level, got: #fsdp.level<captured>}}
  fsdp.unit @u {fsdp.level = #fsdp.level<captured>}
}

// -----

// expected-error @below {{Memory-1: expected fsdp.memory on the module, "shared" or "device", got: "host"}}
module attributes {fsdp.memory = "host"} {
}

// -----

// expected-error @below {{Arena-1: expected fsdp.arena on the module, with the integers bytes and lower_bound, got: {bytes = 128 : i64}}}
module attributes {fsdp.arena = {bytes = 128 : i64}} {
}

// -----

module {
  // expected-error @below {{Arena-1: expected fsdp.host_arena on the module}}
  fsdp.unit @u {fsdp.host_arena = {bytes = 128 : i64, lower_bound = 128 : i64}}
}

// -----

// expected-error @below {{Captured-2: expected settings of PyTorch among "float32_matmul_precision", }}
module attributes {fsdp.captured_for = {device = "cpu", numerics = {rounding = "up"}, torch = "2.15.0"}} {
}

// -----

// expected-error @below {{Captured-2: expected one of "off", "warn", "on" for "deterministic_algorithms", got "true"}}
module attributes {fsdp.captured_for = {device = "cpu", numerics = {deterministic_algorithms = "true"}, torch = "2.15.0"}} {
}
