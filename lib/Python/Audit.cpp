//===- Audit.cpp - audit events of Python ---------------------------------===//
//
// An audit hook stays as long as its process, and some events are as frequent
// as calls of id(). A hook that is written in Python would slow all code down
// that runs after the first compilation, so this one is in C++.
//
//===----------------------------------------------------------------------===//
#include "Audit.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <vector>

namespace py = pybind11;

namespace {

/// Used under the interpreter's lock.
struct Audited {
  std::vector<std::string> events;
  PyObject *callback = nullptr; // owned
};

// Not destroyed: events come until the interpreter ends.
Audited &audited() {
  static auto *instance = new Audited;
  return *instance;
}

int hook(const char *event, PyObject *arguments, void *) {
  Audited &wanted = audited();
  if (!wanted.callback ||
      std::ranges::find(wanted.events, event) == wanted.events.end())
    return 0;
  PyObject *callback = wanted.callback; // which another thread may replace
  Py_INCREF(callback);
  PyObject *result = PyObject_CallFunction(callback, "sO", event, arguments);
  Py_XDECREF(result);
  Py_DECREF(callback);
  return result ? 0 : -1;
}

} // namespace

void bindAudit(py::module_ &module) {
  module.def(
      "audit",
      [](const std::vector<std::string> &events, const py::object &callback) {
        static const bool isInstalled = PySys_AddAuditHook(hook, nullptr) == 0;
        if (!isInstalled)
          throw py::error_already_set();
        Audited &wanted = audited();
        PyObject *before = wanted.callback;
        wanted.events = events;
        wanted.callback =
            callback.is_none() ? nullptr : callback.inc_ref().ptr();
        Py_XDECREF(before);
      },
      "From now on calls `callback` with each of these audit events and its "
      "arguments, in whichever thread it is raised; None ends that. An "
      "exception of the callback goes to the code that raised the event.");
}
