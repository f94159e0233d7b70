//===- Audit.h - audit events of Python ------------------------*- C++ -*-===//
#ifndef FSDP_PYTHON_AUDIT_H
#define FSDP_PYTHON_AUDIT_H

#include <pybind11/pybind11.h>

/// The function `audit`: python/fsdp_mlir/frontdoor/process_reads.py uses it.
void bindAudit(pybind11::module_ &module);

#endif // FSDP_PYTHON_AUDIT_H
