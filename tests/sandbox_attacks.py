"""Programs that try to escape the sandbox of DeepCoder's grader or to earn an undeserved reward.

Each program reads four lines: the process id of its grader, a world-writable folder, the port of a
listening server, and a file that holds the answer. TRIES print "held" if the attack fails and "out"
if it succeeds; ENDS do something that has the given outcome.
"""

READ = """
import os, sys
PARENT, FOLDER, PORT, SECRET = [line.strip() for line in sys.stdin.read().splitlines()[:4]]
PARENT, PORT = int(PARENT), int(PORT)
"""

TRY = """
try:
{body}
except BaseException:
    print("held")
else:
    print("out")
"""

RAW = """
import ctypes
X86 = os.uname().machine == "x86_64"
libc = ctypes.CDLL(None, use_errno=True)
def call(*numbers):
    if libc.syscall(*map(ctypes.c_long, numbers)) < 0:
        raise OSError(ctypes.get_errno())
"""


def trying(body, before=""):
    """Return a program that prints whether `body` raised an error."""
    lines = "\n".join("    " + line for line in body.strip("\n").splitlines())
    return READ + before + TRY.format(body=lines)


# Each attack must raise an error if it had no effect.
TRIES = {
    # ---- processes that outlive the test
    "fork": trying("if os.fork() == 0:\n    import time; time.sleep(100)"),
    "daemon": trying(
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import time
        open(FOLDER + "/daemon", "w")
        time.sleep(100)
"""
    ),
    "shell": trying("assert os.system('sleep 100 &') == 0"),
    "subprocess": trying("import subprocess; subprocess.Popen(['/bin/sleep', '100'])"),
    "posix_spawn": trying("os.posix_spawn('/bin/sleep', ['sleep', '100'], {})"),
    "exec": trying("os.execv('/bin/sh', ['sh', '-c', 'echo out'])"),
    "multiprocessing": trying(
        "import multiprocessing as m\np = m.get_context('fork').Process(target=print); p.start()"
    ),
    "zombies": trying("for _ in range(50):\n    if os.fork() == 0: os._exit(0)"),
    "vfork": trying("call(58 if X86 else 220, 0x4111)", RAW),
    "clone3": trying("call(435, ctypes.addressof(ctypes.create_string_buffer(88)), 88)", RAW),
    "setsid": trying("os.setsid()"),
    # ---- memory
    "much_memory": trying("bytearray(10**12)"),
    "much_mapped": trying("import mmap; mmap.mmap(-1, 10**10)"),
    "more_memory": trying(
        "import resource as r\nr.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY, r.RLIM_INFINITY))"
    ),
    "more_time": trying("import resource as r\nr.setrlimit(r.RLIMIT_CPU, (900, 900))"),
    "many_threads": trying(
        """
import threading
stop = threading.Event()
try:
    for _ in range(10_000):
        threading.Thread(target=stop.wait).start()
finally:
    stop.set()
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        thread.join()
"""
    ),
    "memory_file": trying("os.memfd_create('file')"),
    # ---- files
    "write": trying("open(FOLDER + '/file', 'w').write('x' * 10**6)"),
    "write_anywhere": trying(
        """
places = [FOLDER, "/", "/tmp", "/var/tmp", "/dev/shm", "/dev", ".", os.path.expanduser("~")]
for place in places:
    try:
        open(place + "/left_behind_by_attack", "w")
    except OSError:
        continue
    break
else:
    raise OSError
"""
    ),
    "folder": trying("os.mkdir(FOLDER + '/folder')"),
    "symlink": trying("os.symlink(SECRET, FOLDER + '/link')"),
    "symlink_here": trying("os.symlink('/etc', 'link')"),
    "hard_link": trying("os.link(SECRET, FOLDER + '/link')"),
    "rename": trying("os.rename(SECRET, FOLDER + '/renamed')"),
    "remove": trying("os.remove(SECRET)"),
    "truncate": trying("os.truncate(SECRET, 0)"),
    "mode": trying("os.chmod(SECRET, 0)"),
    "times": trying("os.utime(SECRET, (0, 0))"),
    "fifo": trying("os.mkfifo(FOLDER + '/fifo')"),
    "sitecustomize": trying(
        """
import sysconfig
for name in ("purelib", "stdlib"):
    try:
        open(sysconfig.get_path(name) + "/sitecustomize.py", "w")
    except OSError:
        continue
    break
else:
    raise OSError
"""
    ),
    "temporary": trying("import tempfile; tempfile.TemporaryFile()"),
    "own_files": trying("open('/proc/self/fd/0', 'w').write('x')"),
    "lower_priority": trying("os.nice(1)"),
    # ---- secrets
    "read_the_answer": trying("print(open(SECRET).read())"),
    "read_by_parent": trying("print(open(f'/proc/{PARENT}/root{SECRET}').read())"),
    "passwords": trying("open('/etc/shadow').read()"),
    "home": trying("import glob; assert glob.glob(os.path.expanduser('~') + '/.*[a-z]/*')"),
    "other_packages": trying("sys.path.append(os.path.dirname(FOLDER)); import ragen_jax"),
    "packages_files": trying(
        """
import sysconfig
found = []
for folder, _, names in os.walk(sysconfig.get_path("stdlib") + "/site-packages"):
    for name in names:
        try:
            found.append(open(os.path.join(folder, name), "rb").read(1))
        except OSError:
            pass
assert found
"""
    ),
    "environment": trying(
        "assert len(set(os.environ) - {'PYTHONHASHSEED', 'LC_CTYPE', 'PWD'}) > 0"
    ),
    "parents_environment": trying("open(f'/proc/{PARENT}/environ', 'rb').read()"),
    "parents_memory": trying("open(f'/proc/{PARENT}/mem', 'rb').seek(0)"),
    "parents_maps": trying("open(f'/proc/{PARENT}/maps').read()"),
    "parents_files": trying("assert os.listdir(f'/proc/{PARENT}/fd')"),
    "other_processes": trying("assert [n for n in os.listdir('/proc') if n.isdigit()]"),
    "own_descriptors": trying(
        """
found = []
for number in range(3, 64):
    try:
        found.append(os.fstat(number))
    except OSError:
        pass
assert found
"""
    ),
    "frames": trying(
        """
import gc
frame, seen = sys._getframe(), []
while frame:
    seen.append(repr(frame.f_locals) + repr(frame.f_globals))
    frame = frame.f_back
seen += [repr(x) for x in gc.get_objects() if isinstance(x, (str, list, dict, tuple))]
assert any("-".join(["7321", "held"]) in text for text in seen)
"""
    ),
    # ---- other processes
    "kill_parent": trying("import signal; os.kill(PARENT, signal.SIGKILL)"),
    "kill_its_parent": trying("import signal; os.kill(os.getppid() or 1, signal.SIGKILL)"),
    "kill_all": trying("import signal; os.kill(-1, signal.SIGKILL)"),
    "kill_group": trying("import signal; os.killpg(0, signal.SIGTERM)"),
    "signal_thread": trying("call(234 if X86 else 131, PARENT, PARENT, 9)", RAW),
    "kill_itself": trying("call(234 if X86 else 131, os.getpid(), os.getpid(), 9)", RAW),
    "pidfd": trying("os.pidfd_open(PARENT)"),
    "ptrace": trying("call(101 if X86 else 117, 16, PARENT, 0, 0)", RAW),
    "read_memory": trying(
        """
buffer = ctypes.create_string_buffer(64)
place = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 64)
at = ctypes.addressof(place)
call(310 if X86 else 270, PARENT, at, 1, at, 1, 0)
""",
        RAW,
    ),
    "die_with_others": trying("call(157 if X86 else 167, 1, 0)", RAW),
    "who_owns_descriptor": trying("import fcntl; fcntl.fcntl(1, fcntl.F_SETOWN, PARENT)"),
    "terminal": trying("import fcntl; fcntl.ioctl(0, 0x5412, b'x')"),
    # ---- the network
    "connect": trying("import socket; socket.create_connection(('127.0.0.1', PORT), 1)"),
    "datagram": trying(
        "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "s.sendto(b'x', ('127.0.0.1', PORT))"
    ),
    "unix_socket": trying("import socket; socket.socket(socket.AF_UNIX).bind('\\0name')"),
    "listen": trying("import socket; socket.create_server(('127.0.0.1', 0))"),
    "netlink": trying("import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)"),
    "names": trying("import socket; socket.getaddrinfo('localhost', 80)[0]; socket.socket()"),
    # ---- the kernel
    "every_call": trying(
        """
# io_uring, bpf, perf, userfaultfd, mount, unshare, setns, chroot, keys, modules, timers, inotify
found = []
for number in (425, 321, 298, 323, 165, 272, 308, 161, 248, 175, 222, 253, 290, 41, 53, 22, 293):
    try:
        call(number, 0, 0, 0, 0, 0)
    except OSError as error:
        if error.args[0] != 1:
            found.append(number)
assert found and X86
""",
        RAW,
    ),
    "other_abi": trying("call(0x40000000 + 39)\nassert X86", RAW),
    "calls_of_32_bits": trying(
        """
import mmap
assert X86
page = mmap.mmap(-1, 4096, prot=7)
page.write(b"\\xb8\\x02\\x00\\x00\\x00\\xcd\\x80\\xc3")  # fork by int 0x80
place = ctypes.addressof(ctypes.c_char.from_buffer(page))
assert ctypes.CFUNCTYPE(ctypes.c_int)(place)() >= 0
""",
        RAW,
    ),
    "new_filter": trying("call(317 if X86 else 277, 1, 0, 0)", RAW),
}

# The output of the released harness if all tests pass.
PAID = '{"is_correct": true, "detail": "", "passed_tests": 1, "total_tests": 1, "runnable": true}'

# Program -> outcome, where "held" is the expected output.
ENDS = {
    "forged_result": (f"print('''{PAID}''')", "wrong"),
    "forged_and_gone": (f"import os; os.write(1, b'''{PAID}'''); os._exit(0)", "wrong"),
    "forged_everywhere": (
        f"""
import os
for number in range(32):
    try:
        os.write(number, b'''{PAID}\\n''')
    except OSError:
        pass
os._exit(0)
""",
        "wrong",
    ),
    "forged_first_line": ("import os; os.write(1, b'held\\nheld\\nheld'); os._exit(0)", "wrong"),
    "forged_fault": ("import os; os.write(1, b'fault: no sandbox\\n'); os._exit(1)", "error"),
    "gone": ("import os; os._exit(0)", "wrong"),
    "as_if_killed": ("import os; os._exit(137)", "error"),
    "as_if_killed_in_thread": (
        "import ctypes, threading, os\nt = threading.Thread(target=int)\nt.start(); t.join()\n"
        "ctypes.CDLL(None).syscall(60 if os.uname().machine == 'x86_64' else 93, 137)\nos._exit(3)",
        "error",
    ),
    "killed": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "error"),
    "aborted": ("import os; os.abort()", "error"),
    "crashed": ("import ctypes; ctypes.string_at(0)", "error"),
    "right_but_failed": ("print('held'); raise SystemExit(1)", "error"),
    "fork_bomb": ("import os\nwhile True: os.fork()", "error"),
    "patient_fork_bomb": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "time",
    ),
    "more_and_more": ("x = []\nwhile True: x.append(bytes(10**7))", "error"),
    "recursion": ("def f(): f()\nf()", "error"),
    "deep_recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return [f(n + 1)]\nf(0)",
        "error",
    ),
    "deep_recursion_in_c": (
        "import sys\nsys.setrecursionlimit(10**9)\nx = []\ny = []\n"
        "for _ in range(10**6): x, y = [x], [y]\nx == y",
        "error",
    ),
    "output": ("while True: print('x' * 10**6)", "output"),
    "small_output": ("import os, time\nwhile True: os.write(1, b'x'), time.sleep(1e-4)", "time"),
    "errors": ("import sys\nwhile True: sys.stderr.write('x' * 10**5)", "time"),
    "loop": ("while True: pass", "time"),
    "sleep": ("import time; time.sleep(1000)", "time"),
    "waits_for_input": ("import sys\nwhile True: sys.stdin.read()", "time"),
    "closed": ("import os\nos.close(0); os.close(1); os.close(2)\nwhile True: pass", "time"),
    "deaf": (
        "import signal\nfor n in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "time",
    ),
    "blocked": (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))\n"
        "while True: pass",
        "time",
    ),
    "threads": (
        "import threading\ndef f():\n    while True: pass\n"
        "for _ in range(8): threading.Thread(target=f).start()",
        "time",
    ),
    "threads_without_lock": (
        "import zlib, threading\nx = bytes(10**7)\ndef f():\n"
        "    while True: zlib.crc32(x)\n"
        "for _ in range(8): threading.Thread(target=f).start()",
        "time",
    ),
    "long_power": ("print(9 ** 9 ** 9)", "time"),
    "slow_pattern": ("import re; re.match(r'(a+)+$', 'a' * 40 + 'b')", "time"),
    "no_text": ("import os; os.write(1, bytes(range(256)))", "wrong"),
    "syntax": ("def f(:", "error"),
    "nothing": ("", "wrong"),
    "zero": ("print('held')\0", "error"),
    "half_a_character": ("print('held') # \ud800", "error"),
    "too_long": ("#" * 10**6 + "\nprint('held')", "error"),
    "nested": ("(" * 10**5, "error"),
    "late_output": (
        "import atexit, os\natexit.register(lambda: os.write(1, b'x'))\nprint('held', flush=True)",
        "wrong",
    ),
}

# The same for a function `f`, called with 1, whose result should be [42].
FUNCTIONS = {
    "equals_all": (
        "class A:\n    def __eq__(self, other): return True\ndef f(n): return A()",
        "error",
    ),
    "list_equals_all": (
        "class A(list):\n    def __eq__(self, other): return True\ndef f(n): return A()",
        "wrong",
    ),
    "item_equals_all": (
        "class A(int):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
        "def f(n): return [A()]",
        "wrong",
    ),
    "says_so": ("def f(n): return 'passed'", "wrong"),
    "forged_dumps": (
        f"import json\njson.dumps = lambda value: '''{PAID}'''\ndef f(n): return 41",
        "wrong",
    ),
    "forged_builtins": (
        "import builtins\nbuiltins.isinstance = lambda *_: True\ndef f(n): return object()",
        "error",
    ),
    "prints_it": ("def f(n): print([42])", "wrong"),
    "writes_and_goes": ("import os\ndef f(n): os.write(1, b'[42]'); os._exit(0)", "wrong"),
    "writes_other_and_goes": (
        "import os\ndef f(n):\n    for n in range(3, 32):\n        try: os.write(n, b'[41]')\n"
        "        except OSError: pass\n    os._exit(0)",
        "wrong",
    ),
    "no_function": ("def g(n): return [42]", "error"),
    "no_data": ("def f(n): return f", "error"),
    "a_set": ("def f(n): return {42}", "error"),
    "deep": ("def f(n):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x", "error"),
    "long_number": ("def f(n): return 10**4000", "wrong"),
    "no_number": ("def f(n): return [float('nan')]", "wrong"),
    "many_equal_hashes": (
        "def f(n): return {i * (2**61 - 1): 1 for i in range(500)} | {'x': list(range(10**5))}",
        "wrong",
    ),
    "result_without_end": ("def f(n): return [0] * 10**6", "output"),
    "at_import": ("while True: pass", "time"),
}
