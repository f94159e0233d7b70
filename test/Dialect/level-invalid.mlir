// RUN: fsdp-opt --split-input-file --verify-diagnostics %s

// expected-error @below {{Level-1: expected fsdp.level on the module, an #fsdp.level, got: "sharded"}}
module attributes {fsdp.level = "sharded"} {
}

// -----

module {
  // expected-error @below {{Level-1: expected fsdp.level on the module, an #fsdp.level, got: #fsdp.level<captured>}}
  fsdp.unit @u {fsdp.level = #fsdp.level<captured>}
}
