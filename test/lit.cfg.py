# The lit suite: one test file a pass (its stem is the pass's), one for each
# kind of op, and *-invalid.mlir for what verifiers must refuse.
import os

import lit.formats

config.name = "fsdp"
config.test_format = lit.formats.ShTest(execute_external=False)
config.suffixes = [".mlir", ".test"]
config.excludes = ["Inputs", "python", "parity"]
config.test_source_root = os.path.dirname(__file__)
config.environment["PATH"] = os.pathsep.join(
    [config.fsdp_bin_dir, config.llvm_tools_dir, config.environment["PATH"]]
)
# The package of this source tree, whichever tree the interpreter's environment was made for.
config.environment["PYTHONPATH"] = os.path.join(os.path.dirname(config.test_source_root), "python")
# Variables do not leak from one CHECK-LABEL to the next.
config.environment["FILECHECK_OPTS"] = "-enable-var-scope"
config.substitutions.append(("%python", config.fsdp_python))
config.substitutions.append(("%build", config.fsdp_build_dir))
