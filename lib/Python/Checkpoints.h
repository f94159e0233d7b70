//===- Checkpoints.h - checkpoints for the module of Python ---------------===//
#ifndef FSDP_PYTHON_CHECKPOINTS_H
#define FSDP_PYTHON_CHECKPOINTS_H

#include <pybind11/pybind11.h>

/// The class `Checkpoints`: python/fsdp_mlir/state/checkpoints.py uses it.
void bindCheckpoints(pybind11::module_ &module);

#endif // FSDP_PYTHON_CHECKPOINTS_H
