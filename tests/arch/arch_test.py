"""The architecture as a test: who may include whom, where other people's headers may appear, sizes, words, and MPI calls that
must not block. Every rule is a function from {path: text} to a list of sentences, so each is also tested on a planted violation.

    python3 tests/arch/arch_test.py [--build BUILD] [--source ROOT] [unittest's own arguments]

Compiling each header alone needs a configured build folder (its compile_commands.json). What the build itself has compiled alone,
at the head of a source, is not compiled again; what has passed is remembered there.
"""
import argparse
import concurrent.futures
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = None

PRODUCT = ("cli", "engine", "parallel", "workloads")
CODE = (".h", ".cpp", ".cu", ".cuh", ".def")

# ------------------------------------------------------------------------------------------------------------ the architecture
# folder -> folders below it that it may include. A folder may always include itself. "parallel" without a second part means the
# files directly in parallel/: the contract of the engines and its registry.
ARROWS = {
    "engine/base": (),
    # A tensor is a view that knows no device; a device hands out buffers as tensors.
    "engine/tensor": ("engine/base",),
    "engine/device": ("engine/base", "engine/tensor"),
    "engine/backend": ("engine/base", "engine/tensor", "engine/device"),
    "engine/nn": ("engine/base", "engine/tensor", "engine/device", "engine/backend"),
    "engine/optim": ("engine/base", "engine/tensor", "engine/device", "engine/backend", "engine/nn"),
    "engine/data": ("engine/base", "engine/tensor", "engine/device"),
    "engine/record": ("engine/base", "engine/tensor", "engine/device"),
    "workloads": ("engine",),
    "parallel/comm": ("engine",),
    "parallel/grid": ("engine",),
    "parallel": ("engine", "parallel/comm", "parallel/grid"),
    "parallel/sync": ("engine", "parallel/comm", "parallel/grid", "parallel"),
    # A stage's gradients are summed and its optimizer divided like those of a whole model.
    "parallel/pipeline": ("engine", "parallel/comm", "parallel/grid", "parallel", "parallel/sync"),
    "parallel/shard": ("engine", "parallel/comm", "parallel/grid", "parallel"),
    "parallel/engines": ("engine", "parallel/comm", "parallel/grid", "parallel", "parallel/sync", "parallel/pipeline",
                         "parallel/shard"),
    "cli": ("engine", "workloads", "parallel*"),  # * : its subfolders as well
}

# header -> paths that may include it
EXTERNAL = (
    (r"(cuda.*|cupti.*|cublas.*|cudnn.*|curand.*|nvtx3/.*|nvToolsExt.*|cub/.*|thrust/.*|cooperative_groups.*|mma\.h)",
     r"engine/device/cuda_[^/]*|engine/backend/cuda/.*|parallel/comm/nccl_[^/]*"),
    (r"nccl\.h", r"parallel/comm/nccl_[^/]*"),
    (r"mpi\.h", r"parallel/comm/.*|cli/main\.cpp"),
    (r"nlohmann/.*", r"engine/base/config_[^/]*|engine/record/.*|cli/.*"),
    (r"CLI/.*", r"cli/args\.cpp"),
    (r"catch2/.*", r"tests/.*"),
    (r"(oneapi/)?dnnl.*", r"engine/backend/cpu/onednn_[^/]*"),
    (r"pcre2\.h|zlib\.h", r"engine/data/.*"),
    (r"omp\.h", r"engine/device/.*|engine/backend/cpu/.*"),
    (r"pdl_build_info\.h", r"cli/.*|engine/record/.*"),
    # the compiler's and the system's own
    (r"[a-z_0-9]+", r".*"),
    (r"(assert|ctype|cxxabi|errno|fcntl|immintrin|limits|netdb|poll|pthread|sched|signal|stddef|stdint|stdio|stdlib|string|strings|time"
     r"|unistd|dlfcn|dirent|glob|cpuid|linux/[a-z_]+|sys/[a-z_]+|arpa/inet|netinet/in)\.h", r".*"),
)

FORBIDDEN_FOLDERS = ("common", "utils", "util", "helpers", "helper", "misc")
ROOT_ENTRIES = ("cli", "engine", "parallel", "workloads", "configs", "scripts", "results", "tests", "docs",
                "CMakeLists.txt", "README.md", "LICENSE")

HEADER_LINES, SOURCE_LINES, MAIN_LINES, FUNCTION_LINES = 200, 500, 40, 60
ENGINE_LINES = (150, 450)
# path -> why it may break the size rules
SIZE_EXCEPTIONS = {
    "parallel/engines/serial.cpp": "the reference: no parallelism, so little to say",
}
# "path:function" -> why it may be longer
FUNCTION_EXCEPTIONS = {}

ENGINES = ("ddp", "zero", "lbann", "megatron", "pipedream", "torchgpipe")
ENGINE_NAME_HOMES = r"parallel/engines/.*|parallel/engines\.def"

BLOCKING_MPI = re.compile(
    r"\bMPI_(Send|Ssend|Bsend|Rsend|Recv|Sendrecv|Sendrecv_replace|Probe|Mprobe|Mrecv|Wait|Waitall|Waitany|Waitsome|Barrier|Bcast"
    r"|Reduce|Allreduce|Reduce_scatter|Reduce_scatter_block|Scan|Exscan|Scatter|Scatterv|Gather|Gatherv|Allgather|Allgatherv"
    r"|Alltoall|Alltoallv|Alltoallw|Neighbor_\w+|Intercomm_create|Win_fence|Win_lock|Win_flush|Win_unlock|File_\w+)\s*\(")

# "path: variable" -> why it may be a mutable global
MUTABLE_GLOBAL_TYPES = re.compile(r"\bsig_atomic_t\b|\batomic<bool>|\batomic_bool\b|\batomic_flag\b")  # a signal's stop flag


# ------------------------------------------------------------------------------------------------------------- reading the code
def read_tree(root):
    """{path: text} of all code, paths relative to the root with "/"."""
    files = {}
    for top in PRODUCT + ("tests",):
        for folder, subfolders, names in os.walk(os.path.join(root, top)):
            subfolders.sort()
            for name in sorted(names):
                if name.endswith(CODE):
                    path = os.path.join(folder, name)
                    with open(path, encoding="utf-8") as file:
                        files[os.path.relpath(path, root).replace(os.sep, "/")] = file.read()
    return files


TOKEN = re.compile(
    r'(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<raw>R"(?P<tag>[^()\s\\]*)\(.*?\)(?P=tag)")|(?P<string>"(?:\\.|[^"\\\n])*")'
    r"|(?P<char>(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+')", re.S)


def strip(text, keep_strings):
    """Comments (and strings) become blanks; line numbers stay."""
    def blank(match):
        if keep_strings and not match.group("comment"):
            return match.group(0)
        newlines = "\n" * match.group(0).count("\n")
        return " " + newlines if match.group("comment") else '""' + newlines
    return TOKEN.sub(blank, text)


def includes(text):
    """(line number, header, is_quoted) of every include."""
    found = []
    for number, line in enumerate(strip(text, keep_strings=True).splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*(?:<([^>]+)>|"([^"]+)")', line)
        if match:
            found.append((number, match.group(1) or match.group(2), match.group(2) is not None))
    return found


def folder_of(path):
    """The folder of ARROWS that a path belongs to, or None."""
    parts = path.split("/")
    if parts[0] in ("engine", "parallel") and len(parts) > 2:
        return "/".join(parts[:2])
    if parts[0] in PRODUCT:
        return parts[0]
    return None


def functions(text):
    """(name, first line, lines) of the functions that a source defines, by its braces."""
    code = strip(text, keep_strings=False)
    code = re.sub(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", lambda m: "\n" * m.group(0).count("\n"), code, flags=re.M)
    found, scopes, head, line = [], [], "", 1
    for c in code:
        if c == "\n":
            line += 1
        if c == "{":
            scopes.append((kind_of_scope(head, scopes), head.strip(), line))
            # inside the list of a constructor's initialisers the head goes on after the brace
            if scopes[-1][0] == "initialiser":
                scopes[-1] = ("initialiser", head, line)
            head = ""
        elif c == "}":
            if scopes:
                kind, scope_head, first = scopes.pop()
                if kind == "function":
                    found.append((function_name(scope_head), first, line - first + 1))
                if kind == "initialiser":
                    head = scope_head + "{}"
                    continue
            head = ""
        elif c == ";":
            head = ""
        else:
            head += c
    return found


def kind_of_scope(head, scopes):
    outer = scopes[-1][0] if scopes else "namespace"
    if outer not in ("namespace", "type"):
        return "block"
    text = head.strip()
    if text.count("(") > text.count(")"):
        return "initialiser"  # a default argument
    if re.search(r'\bnamespace\b[\w:\s]*$|\bextern\s*""$', text):
        return "namespace"
    if "(" not in text:
        if re.search(r"\b(class|struct|union|enum)\b", text) and not text.endswith("="):
            return "type"
        return "block"
    if re.search(r"\b(class|struct|union)\s+(\w+\s*)?(alignas\([^)]*\)\s*)?\w+[^()]*$", text):
        return "type"
    if re.search(r"\)[^()]*[^:]:[^:]", text) and re.search(r"[\w>]$", head) and not re.search(
            r"\b(const|noexcept|override|final|try)$", text):
        return "initialiser"
    if re.search(r"=\s*(\[.*\].*)?$", text, re.S) or re.match(r"^(constexpr|const|static|inline|auto)\b[^()]*=", text):
        return "block"
    return "function"


def function_name(head):
    head = re.sub(r"\s+", " ", head)
    match = re.search(r"([~\w:]+|operator[^\s(]*)\s*\(", head)
    return match.group(1) if match else head[-40:]


# ------------------------------------------------------------------------------------------------------------------- the rules
def may_include(folder, target):
    for allowed in ARROWS[folder]:
        if allowed.endswith("*"):
            if target == allowed[:-1] or target.startswith(allowed[:-1] + "/"):
                return True
        elif target == allowed or (allowed == "engine" and target.startswith("engine/")):
            return True
    return False


def check_arrows(files):
    problems = []
    for path, text in files.items():
        folder = folder_of(path)
        if folder is None:
            continue
        if folder not in ARROWS:
            problems.append(f"{path}: {folder}/ is no folder of the design")
            continue
        for line, header, quoted in includes(text):
            if not quoted or header == "pdl_build_info.h":
                continue
            if header.startswith("tests/"):
                problems.append(f"{path}:{line}: nothing includes tests/ ({header})")
                continue
            target = folder_of(header)
            if target is None:
                problems.append(f'{path}:{line}: "{header}" is not a full path from the root')
            elif target != folder and not may_include(folder, target):
                problems.append(f"{path}:{line}: {folder}/ must not include {target}/ ({header})")
    return problems


def check_cycles(files):
    graph = {path: [header for _, header, quoted in includes(text) if quoted and header in files]
             for path, text in files.items()}
    problems, state = [], {}

    def visit(path, trail):
        if state.get(path) == "done":
            return
        if path in trail:
            problems.append("headers include each other: " + " -> ".join(trail[trail.index(path):] + [path]))
            return
        for header in graph[path]:
            visit(header, trail + [path])
        state[path] = "done"

    for path in graph:
        visit(path, [])
    return problems


def check_external(files):
    problems = []
    for path, text in files.items():
        for line, header, quoted in includes(text):
            if quoted and header != "pdl_build_info.h":
                continue
            rule = next((homes for pattern, homes in EXTERNAL if re.fullmatch(pattern, header)), None)
            if rule is None:
                problems.append(f"{path}:{line}: <{header}> is not among the libraries of the project")
            elif not re.fullmatch(rule, path) and not path.startswith("tests/"):  # tests may include anything
                problems.append(f"{path}:{line}: <{header}> belongs in {rule}")
    return problems


def check_sizes(files):
    problems = []
    for path, text in files.items():
        lines = text.count("\n")
        if path in SIZE_EXCEPTIONS:
            continue
        if path.startswith("parallel/engines/") and path.endswith(".cpp"):
            low, high = ENGINE_LINES
            if not low <= lines <= high:
                problems.append(f"{path}: {lines} lines; an engine file has {low} to {high}")
            continue
        limit = HEADER_LINES if path.endswith((".h", ".cuh")) else MAIN_LINES if path == "cli/main.cpp" else SOURCE_LINES
        if lines > limit:
            problems.append(f"{path}: {lines} lines, at most {limit}")
    return problems


def check_function_lengths(files):
    problems = []
    for path, text in files.items():
        if path.startswith("tests/") or not path.endswith((".cpp", ".cu")):
            continue
        for name, first, lines in functions(text):
            if lines > FUNCTION_LINES and f"{path}:{name}" not in FUNCTION_EXCEPTIONS:
                problems.append(f"{path}:{first}: {name} has {lines} lines, at most {FUNCTION_LINES}")
    return problems


def check_engine_names(files):
    """Engines are named in their own files only. Comments may explain with them. "zero" is also a number: it counts as a name when
    it stands alone in a string or before another word, as in ZeroEngine and zero_stage."""
    names = [name for name in ENGINES if name != "zero"]
    in_string = re.compile(rf'\b({"|".join(names)})\b|^"zero"$', re.I)
    camel = [name.capitalize() for name in names] + [name.upper() for name in names] + ["PipeDream", "TorchGPipe"]
    in_code = re.compile(
        rf"(?<![a-zA-Z])({'|'.join(names)})(?![a-z])|(?<![A-Z])({'|'.join(camel)})(?![a-z])"
        r"|(?<![a-zA-Z])zero_(stage|engine|definition|optimizer|knobs|[123])(?![a-z])"
        r"|(?<![A-Z])Zero(?=Stage|Engine|Definition|Optimizer|Knobs|[123])")
    problems = []
    for path, text in files.items():
        if path.startswith("tests/") or re.fullmatch(ENGINE_NAME_HOMES, path):
            continue
        code = strip(text, keep_strings=True)
        for number, line in enumerate(code.splitlines(), 1):
            strings = re.findall(r'"(?:\\.|[^"\\])*"', line)
            bare = re.sub(r'"(?:\\.|[^"\\])*"', '""', line)
            for text_of in [s for s in strings if in_string.search(s)] + [m.group(0) for m in in_code.finditer(bare)]:
                problems.append(f"{path}:{number}: {text_of} names an engine outside parallel/engines/")
    return problems


def check_blocking_mpi(files):
    problems = []
    for path, text in files.items():
        for number, line in enumerate(strip(text, keep_strings=False).splitlines(), 1):
            match = BLOCKING_MPI.search(line)
            if match:
                problems.append(f"{path}:{number}: MPI_{match.group(1)} blocks inside MPI; use the non-blocking call and the wait loop")
    return problems


def check_mutable_globals(files):
    """Variables at namespace scope in sources. A heuristic: what looks like `type name;`, `type name = ...` or `type name{...}`."""
    problems = []
    for path, text in files.items():
        if path.startswith("tests/") or not path.endswith((".cpp", ".h")):
            continue
        for first, statement in namespace_statements(text):
            words = re.sub(r"\s+", " ", statement).strip()
            if re.match(r"(using|typedef|extern|template|friend|class|struct|enum|union|namespace|return|static_assert|inline namespace"
                        r"|case|public|private|PDL_)\b", words) or re.search(r"\b(const|constexpr|constinit const)\b", words.split("=")[0]):
                continue
            if re.match(r"(?:(?:static|inline|thread_local|volatile)\s+)*[\w:]+(?:<[^()]*>)?[\s*&]+\w+\s*(?:\[[^\]]*\]\s*)?(=.*|\{.*)?$",
                        words) and not MUTABLE_GLOBAL_TYPES.search(words):
                problems.append(f"{path}:{first}: mutable global: {words[:60]}")
    return problems


def namespace_statements(text):
    code = strip(text, keep_strings=False)
    code = re.sub(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", lambda m: "\n" * m.group(0).count("\n"), code, flags=re.M)
    scopes, head, line, first = [], "", 1, 1
    for c in code:
        if c == "\n":
            line += 1
        outside = all(kind == "namespace" for kind, _ in scopes)
        if c == "{":
            scopes.append((kind_of_scope(head, [s + (0,) for s in scopes]), head))
            if outside:
                head = ""
        elif c == "}":
            kind, opened = scopes.pop() if scopes else ("block", "")
            if all(k == "namespace" for k, _ in scopes):
                head = opened + "{}" if kind == "block" else ""
        elif c == ";" and outside:
            if head.strip():
                yield first, head
            head = ""
        elif outside:
            if not head.strip():
                first = line
            head += c


def tracked_root_entries():
    """What git keeps at the root; what else lies there is nobody's business. Empty without git."""
    try:
        done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return []
    return sorted({path.split("/")[0] for path in done.stdout.splitlines()}) if done.returncode == 0 else []


def check_folders(folders, root_entries):
    problems = [f"{folder}: say what is in it instead" for folder in folders
                if folder.split("/")[-1].lower() in FORBIDDEN_FOLDERS]
    problems += [f"{name}: does not belong at the root" for name in root_entries
                 if not name.startswith((".", "build")) and name not in ROOT_ENTRIES]
    return problems


# -------------------------------------------------------------------------------------------------------------- headers alone
def compile_flags(build):
    """{top folder: (compiler, flags)} from the build's own commands; of a folder's several, the one that sees most headers."""
    with open(os.path.join(build, "compile_commands.json"), encoding="utf-8") as file:
        entries = json.load(file)
    def places(words):
        return sum(word.startswith(("-I", "-isystem")) for word in words)

    flags = {}
    for entry in entries:
        path = os.path.relpath(entry["file"], ROOT).replace(os.sep, "/")
        words = shlex.split(entry["command"])
        while words and not re.search(r"(c\+\+|g\+\+|clang\+\+)[-.\d]*$", words[0]):  # what stands in front: ccache
            words.pop(0)
        kept, skip = [], False
        for word in words[1:]:
            if skip or word in ("-c", "-o", "-MD", "-MT", "-MF", entry["file"]):
                skip = not skip and word in ("-o", "-MT", "-MF")
                continue
            if not word.startswith(("-O", "-fsanitize")):
                kept.append(word)
        top = path.split("/")[0]
        if words and (top not in flags or places(kept) > places(flags[top][1])):
            flags[top] = (words[0], kept)
    return flags


def header_is_for_absent_feature(path, flags):
    name = path.split("/")[-1]
    for feature, pattern in (("CUDA", r"engine/backend/cuda/|cuda_[^/]*$"), ("NCCL", r"nccl_[^/]*$"), ("ONEDNN", r"onednn_[^/]*$")):
        if (re.search(pattern, path) or re.match(pattern, name)) and f"-DPDL_WITH_{feature}=1" not in flags:
            return True
    return path.endswith(".cuh")


def closure(path, files):
    """A file and the project's headers behind it."""
    seen, todo = set(), [path]
    while todo:
        header = todo.pop()
        if header not in seen and header in files:
            seen.add(header)
            todo += [h for _, h, quoted in includes(files[header]) if quoted]
    return seen


def opening_header(text):
    """The project's header that a source includes ahead of anything else, or None."""
    first = includes(text)[:1]
    if not first or not first[0][2] or "".join(strip(text, keep_strings=True).splitlines()[:first[0][0] - 1]).strip():
        return None
    return first[0][1]


def headers_the_build_proves(files, build, root):
    """Headers that open a source whose object is newer than all that lies behind it: compiling that was compiling them alone."""
    def changed(path):
        return os.path.getmtime(path) if os.path.exists(path) else 0.0

    with open(os.path.join(build, "compile_commands.json"), encoding="utf-8") as file:
        entries = json.load(file)
    proven = set()
    for entry in entries:
        source = os.path.relpath(entry["file"], root).replace(os.sep, "/")
        header = opening_header(files.get(source, ""))
        words = shlex.split(entry["command"])
        if header in files and strip(files[header], True).lstrip().startswith("#pragma once") and "-o" in words:
            built = changed(os.path.join(entry["directory"], words[words.index("-o") + 1]))
            if all(changed(os.path.join(root, behind)) < built for behind in closure(source, files)):
                proven.add(header)
    return proven


def closure_hash(path, files, words):
    """Hash of all that decides whether a header compiles: its own text, the project's headers behind it, the command."""
    digest = hashlib.sha256(" ".join(words).encode())
    for header in sorted(closure(path, files)):
        digest.update(header.encode() + b"\0" + files[header].encode() + b"\0")
    return digest.hexdigest()


def compile_header_alone(words, path, root):
    """Compiles a source that is nothing but the header, twice included. Returns the compiler's first lines of complaint or ""."""
    source = f'#include "{path}"\n#include "{path}"\n'
    done = subprocess.run(words + ["-x", "c++", "-fsyntax-only", "-"], input=source, capture_output=True, text=True, cwd=root)
    return "" if done.returncode == 0 else f"{path} does not compile alone:\n  " + "\n  ".join(done.stderr.splitlines()[:6])


def check_headers_alone(files, build):
    flags = compile_flags(build)
    memory_path = os.path.join(build, "headers_alone.json")
    try:
        with open(memory_path, encoding="utf-8") as file:
            passed = set(json.load(file))
    except (OSError, ValueError):
        passed = set()
    proven = headers_the_build_proves(files, build, ROOT)
    jobs, keep = [], set()
    for path in files:
        top = path.split("/")[0]
        if not path.endswith(".h") or top not in flags or path in proven:
            continue
        compiler, words = flags[top]
        if header_is_for_absent_feature(path, words):
            continue
        key = closure_hash(path, files, [compiler] + words)
        if key in passed:
            keep.add(key)
        else:
            jobs.append((key, [compiler] + words, path))
    problems = []
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        for (key, _, _), problem in zip(jobs, pool.map(lambda job: compile_header_alone(job[1], job[2], ROOT), jobs)):
            if problem:
                problems.append(problem)
            else:
                keep.add(key)
    with open(memory_path + ".new", "w", encoding="utf-8") as file:
        json.dump(sorted(keep), file)
    os.replace(memory_path + ".new", memory_path)
    return problems


# ------------------------------------------------------------------------------------------------------------ tests of the tree
class Tree(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.files = read_tree(ROOT)

    def hold(self, problems):
        if problems:
            self.fail(f"{len(problems)} violations\n" + "\n".join(problems))

    def test_there_is_code(self):
        self.assertGreater(len(self.files), 10)

    def test_include_arrows(self):
        self.hold(check_arrows(self.files))

    def test_no_include_cycles(self):
        self.hold(check_cycles(self.files))

    def test_external_headers(self):
        self.hold(check_external(self.files))

    def test_file_sizes(self):
        self.hold(check_sizes(self.files))

    def test_function_lengths(self):
        self.hold(check_function_lengths(self.files))

    def test_engine_names(self):
        self.hold(check_engine_names(self.files))

    def test_no_blocking_mpi(self):
        self.hold(check_blocking_mpi(self.files))

    def test_no_mutable_globals(self):
        self.hold(check_mutable_globals(self.files))

    def test_folders(self):
        folders = []
        for top in ROOT_ENTRIES:
            for folder, subfolders, _ in os.walk(os.path.join(ROOT, top)):
                folders += [os.path.relpath(os.path.join(folder, name), ROOT) for name in subfolders]
        self.hold(check_folders(folders, tracked_root_entries()))

    def test_exceptions_are_still_needed(self):
        self.hold([f"{path} is excepted and does not exist" for path in SIZE_EXCEPTIONS if path not in self.files])

    def test_headers_compile_alone(self):
        if BUILD is None or not os.path.exists(os.path.join(BUILD, "compile_commands.json")):
            self.skipTest("no configured build folder: --build BUILD")
        self.hold(check_headers_alone(self.files, BUILD))


# ----------------------------------------------------------------------------------------- each rule finds a planted violation
class Rules(unittest.TestCase):
    def finds(self, problems, *words):
        self.assertEqual(len(problems), 1, problems)
        for word in words:
            self.assertIn(word, problems[0])

    def test_arrow_up_inside_engine(self):
        self.finds(check_arrows({"engine/base/a.h": '#include "engine/tensor/shape.h"\n'}), "engine/base/a.h:1", "engine/tensor")

    def test_arrow_from_engine_to_parallel(self):
        self.finds(check_arrows({"engine/nn/a.cpp": '#include "parallel/engine.h"\n'}), "must not include parallel/")

    def test_arrow_between_workloads_and_parallel(self):
        self.finds(check_arrows({"workloads/a.cpp": '#include "parallel/comm/world.h"\n'}), "parallel/comm")
        self.finds(check_arrows({"parallel/engines/a.cpp": '#include "workloads/gpt2.h"\n'}), "workloads")

    def test_arrow_between_siblings(self):
        self.finds(check_arrows({"parallel/sync/a.h": '#include "parallel/pipeline/schedule.h"\n'}), "parallel/pipeline")
        self.finds(check_arrows({"parallel/comm/a.h": '#include "parallel/engine.h"\n'}), "must not include parallel/")

    def test_arrow_to_tests_and_relative_path(self):
        self.finds(check_arrows({"cli/a.cpp": '#include "tests/support/catch.h"\n'}), "nothing includes tests/")
        self.finds(check_arrows({"cli/a.cpp": '#include "args.h"\n'}), "full path")

    def test_unknown_folder(self):
        self.finds(check_arrows({"engine/extra/a.h": ""}), "no folder of the design")

    def test_arrows_that_are_right(self):
        self.assertEqual(check_arrows({
            "cli/commands/a.cpp": '#include "parallel/comm/world.h"\n#include "workloads/gpt2.h"\n#include "engine/nn/layer.h"\n',
            "parallel/engines/a.cpp": '#include "parallel/sync/replica.h"\n#include "parallel/engine.h"\n',
            "tests/engine/a.cpp": '#include "parallel/engine.h"\n',
            "engine/nn/a.cpp": '// #include "parallel/engine.h"\n/* \n#include "cli/args.h"\n*/\n#include <vector>\n'}), [])

    def test_cycle(self):
        self.finds(check_cycles({"engine/nn/a.h": '#include "engine/nn/b.h"\n', "engine/nn/b.h": '#include "engine/nn/a.h"\n'}),
                   "engine/nn/a.h -> engine/nn/b.h -> engine/nn/a.h")

    def test_external(self):
        for path, header in (("engine/nn/a.cpp", "cuda_runtime.h"), ("engine/device/device.h", "cublasLt.h"),
                             ("engine/nn/a.h", "mpi.h"), ("parallel/sync/a.h", "nccl.h"), ("workloads/report.cpp", "nlohmann/json.hpp"),
                             ("cli/main.cpp", "CLI/CLI.hpp"), ("engine/base/a.h", "catch2/catch.hpp"),
                             ("engine/backend/cpu/linear.cpp", "dnnl.hpp"), ("engine/base/a.cpp", "zlib.h"),
                             ("cli/config.cpp", "pcre2.h"), ("parallel/sync/a.cpp", "omp.h"), ("engine/nn/a.h", "boost/any.hpp"),
                             ("engine/nn/a.h", "Eigen/Dense")):
            self.finds(check_external({path: f"#include <{header}>\n"}), path, header)

    def test_external_that_is_right(self):
        self.assertEqual(check_external({
            "engine/backend/cpu/onednn_library.h": "#include <oneapi/dnnl/dnnl.hpp>\n#include <vector>\n#include <unistd.h>\n",
            "parallel/comm/mpi_world.cpp": "#include <mpi.h>\n#include <sys/stat.h>\n",
            "cli/args.cpp": '#include <CLI/CLI.hpp>\n#include "pdl_build_info.h"\n'}), [])

    def test_sizes(self):
        self.finds(check_sizes({"engine/nn/a.h": "\n" * 201}), "201", "200")
        self.finds(check_sizes({"engine/nn/a.cpp": "\n" * 501}), "501", "500")
        self.finds(check_sizes({"cli/main.cpp": "\n" * 41}), "41", "40")
        self.finds(check_sizes({"parallel/engines/a.cpp": "\n" * 149}), "149")
        self.finds(check_sizes({"parallel/engines/a.cpp": "\n" * 451}), "451")
        self.assertEqual(check_sizes({"engine/nn/a.h": "\n" * 200, "engine/nn/a.cpp": "\n" * 500, "cli/main.cpp": "\n" * 40}), [])

    def test_function_lengths(self):
        body = "  if (a) { b(); }\n" * 59
        self.finds(check_function_lengths({"engine/nn/a.cpp": "namespace pdl {\nvoid Foo::bar(int a) const {\n" + body + "}\n}\n"}),
                   "engine/nn/a.cpp:2", "Foo::bar", "61")
        self.finds(check_function_lengths({"engine/nn/a.cpp": "Foo::Foo(int a)\n    : a_{a},\n      b_(2) {\n" + body + "}\n"}),
                   "engine/nn/a.cpp:3", "Foo::Foo")
        self.finds(check_function_lengths({"engine/nn/a.cpp": "struct A {\n  int f() override {\n" + body + "}\n};\n"}), "f has 61")
        exact = "  f(\"{\", '{', R\"({)\");  // {\n" * 58
        self.assertEqual(check_function_lengths({"engine/nn/a.cpp": "namespace {\nint f() {\n" + exact + "}\n}\n" + "int g() { return 1; }\n" * 70}),
                         [])
        self.assertEqual(check_function_lengths({"engine/nn/a.cpp": "const int table[] = {\n" + "  1,\n" * 80 + "};\nstruct B {\n" + "int a;\n" * 80 + "};\n"}),
                         [])

    def test_functions_are_seen(self):
        text = ("namespace pdl {\nnamespace {\nstruct S final : T {\n  S(int a) : a_(a) {}\n  bool operator==(const S& o) const { return o.a_ == a_; }\n"
                "};\n}\ntemplate <typename T>\nT twice(T a) {\n  auto f = [&](int b) { return b; };\n  return f(a) + a;\n}\n"
                "std::vector<int> g(std::function<void()> h = {}) noexcept {\n  return {1, 2};\n}\nPoint::Point(int x) : x_{x}, y_{0} {\n}\n}\n")
        self.assertEqual([(name, lines) for name, _, lines in functions(text)],
                         [("S", 1), ("operator==", 1), ("twice", 4), ("g", 3), ("Point::Point", 2)])

    def test_engine_names(self):
        for line in ('if (name == "ddp") f();', "int megatron_size = 2;", "class PipedreamPlan {};", 'make("zero");', "ZeroStage s;",
                     "int zero_stage = 1;", "struct DdpKnobs {};", 'log("like torchgpipe");', "lbann::f();"):
            self.finds(check_engine_names({"parallel/sync/a.cpp": line + "\n"}), "parallel/sync/a.cpp:1")

    def test_engine_names_that_are_right(self):
        self.assertEqual(check_engine_names({
            "parallel/sync/a.cpp": '// as in ddp\nInit::zero; fill_zero(); bool is_zero; "is zero"; "configs/gpt2_ddp.json"; nonzero();\n',
            "parallel/engines/ddp.cpp": "DdpKnobs knobs;\n", "parallel/engines.def": "PDL_ENGINE(ddp)\n",
            "tests/parallel/a_test.cpp": '"zero"\n'}), [])

    def test_blocking_mpi(self):
        for call in ("MPI_Barrier(comm)", "MPI_Allreduce (a, b)", "MPI_Wait(&r, s)", "::MPI_Recv(x)", "MPI_Sendrecv(x)"):
            self.finds(check_blocking_mpi({"parallel/comm/mpi_a.cpp": f"  PDL_MPI({call});\n"}), "blocks inside MPI")
        self.assertEqual(check_blocking_mpi({
            "parallel/comm/mpi_a.cpp": "MPI_Init_thread(a); MPI_Iallreduce(a); MPI_Test(a); MPI_Ibarrier(a); MPI_Abort(a, 1);\n"
                                       "MPI_Comm_split_type(a); MPI_Finalize(); // MPI_Barrier(comm)\n"}), [])

    def test_mutable_globals(self):
        for line in ("int counter = 0;", "static std::vector<int> list;", "std::map<int, int> table{};", "thread_local int depth;"):
            self.finds(check_mutable_globals({"engine/base/a.cpp": "namespace pdl {\nnamespace {\n" + line + "\n}\n}\n"}),
                       "engine/base/a.cpp:3", "mutable global")
        self.assertEqual(check_mutable_globals({
            "engine/base/a.cpp": "namespace pdl {\nconstexpr int kA = 1;\nconst std::string kB = \"x\";\nvolatile std::sig_atomic_t stop = 0;\n"
                                 "using A = int;\nint f(int a);\nstruct S { int a = 1; };\nint g() { int b = 1; return b; }\n"
                                 "inline constexpr const char* kC[] = {\"a\", \"b\"};\nA::A() = default;\nstd::vector<int> h();\n}\n"}), [])

    def test_folders(self):
        self.finds(check_folders(["engine/common"], []), "engine/common")
        self.finds(check_folders(["tests/utils"], []), "tests/utils")
        self.finds(check_folders([], ["notes.txt"]), "notes.txt")
        self.assertEqual(check_folders(["engine/base"], ["engine", "build-asan", ".git", "README.md"]), [])

    def test_header_alone(self):
        compiler = next((c for c in ("c++", "g++") if subprocess.run(["which", c], capture_output=True).returncode == 0), None)
        if compiler is None:
            self.skipTest("no compiler in PATH")
        import tempfile
        with tempfile.TemporaryDirectory() as root:
            for name, text in (("good.h", "#pragma once\n#include <string>\nstruct A { std::string a; };\n"),
                               ("needy.h", "#pragma once\nstruct A { std::string a; };\n"),
                               ("twice.h", "#include <string>\nstruct A { std::string a; };\n")):
                with open(os.path.join(root, name), "w", encoding="utf-8") as file:
                    file.write(text)
            words = [compiler, "-std=c++20", f"-I{root}"]
            self.assertEqual(compile_header_alone(words, "good.h", root), "")
            self.assertIn("needy.h does not compile alone", compile_header_alone(words, "needy.h", root))
            self.assertIn("twice.h does not compile alone", compile_header_alone(words, "twice.h", root))

    def test_headers_at_the_head_of_sources(self):
        self.assertEqual(opening_header('// A source.\n\n#include "engine/nn/a.h"\n#include <vector>\n'), "engine/nn/a.h")
        for text in ("", "#include <vector>\n#include \"engine/nn/a.h\"\n", "#define A\n#include \"engine/nn/a.h\"\n"):
            self.assertIsNone(opening_header(text))

    def test_only_what_was_built_since_its_last_change_is_proven(self):
        import tempfile
        header, behind = "engine/nn/a.h", "engine/nn/b.h"
        files = {header: f'#pragma once\n#include "{behind}"\n', behind: "#pragma once\n", "engine/nn/a.cpp": f'#include "{header}"\n'}
        with tempfile.TemporaryDirectory() as root:
            def write(path, text, time):
                os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
                with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                    file.write(text)
                os.utime(os.path.join(root, path), (time, time))
            for path, text in files.items():
                write(path, text, 100)
            write("compile_commands.json", json.dumps([{"directory": root, "file": os.path.join(root, "engine/nn/a.cpp"),
                                                        "command": "g++ -o a.o -c a.cpp"}]), 100)
            self.assertEqual(headers_the_build_proves(files, root, root), set())  # there is no object
            write("a.o", "", 200)
            self.assertEqual(headers_the_build_proves(files, root, root), {header})
            self.assertEqual(headers_the_build_proves({**files, header: f'#include "{behind}"\n'}, root, root), set())
            write(behind, files[behind], 300)
            self.assertEqual(headers_the_build_proves(files, root, root), set())

    def test_memory_of_headers_knows_what_lies_behind(self):
        files = {"engine/nn/a.h": '#include "engine/nn/b.h"\n', "engine/nn/b.h": "int b;\n"}
        before = closure_hash("engine/nn/a.h", files, ["g++"])
        self.assertEqual(before, closure_hash("engine/nn/a.h", dict(files), ["g++"]))
        self.assertNotEqual(before, closure_hash("engine/nn/a.h", {**files, "engine/nn/b.h": "int c;\n"}, ["g++"]))
        self.assertNotEqual(before, closure_hash("engine/nn/a.h", files, ["g++", "-O2"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default=None)
    parser.add_argument("--source", default=ROOT)
    parser.add_argument("--binary")    # accepted like by all test scripts; this one runs no binary
    parser.add_argument("--launcher")
    arguments, rest = parser.parse_known_args()
    ROOT = os.path.abspath(arguments.source)
    BUILD = os.path.abspath(arguments.build) if arguments.build else os.path.join(ROOT, "build")
    unittest.main(argv=[sys.argv[0]] + rest)
