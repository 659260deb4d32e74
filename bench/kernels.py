"""Kernels by themselves: mcc's (codegen/examples/kernel_server.rs) and PyTorch's (peers/torch_kernels.py), which answer the same requests."""

import statistics
import subprocess
from pathlib import Path

# Seconds of a turn, about.
TURN = 0.15

# The products of the models and some that are awkward: M x K x N.
PRODUCTS = ["1024x1024x1024", "2048x384x1536", "1024x768x3072", "1024x3072x768", "256x768x3072", "64x768x3072", "2048x512x8192", "1000x777x333",
            "1024x768x50304"]
# Which factors are stored transposed, and whether the product is added to its result: a model's are NN forward, NT and TN 1 backward.
LAYOUTS = ["NN 0", "NT 0", "TN 0", "TT 0", "TN 1"]
# Batch, heads (of queries/of keys where they differ), positions, size of a head: gpt-nano, gpt-small, llama-mini, and longer ones.
ATTENTIONS = ["8x6x256x64", "2x12x512x64", "8x8/4x256x64", "1x12x1024x64", "1x12x2048x64"]


class Server:
    """A process that answers each line with a line of numbers."""

    def __init__(self, command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)

    def ask(self, what, threads, turn=TURN):
        """The numbers of one turn; none if the process has ended."""
        try:
            self.process.stdin.write(f"{what} {threads} {turn}\n")
            self.process.stdin.flush()
        except OSError:
            return []
        return [float(word) for word in self.process.stdout.readline().split()]

    def peak(self, threads):
        """GFLOP/s of independent multiply-adds, of mcc's server."""
        return statistics.median(self.ask("peak", threads, TURN / 3))

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def works(binary):
    """Whether there is a server that answers: it needs AVX-512."""
    if not binary.exists():
        return False
    server = Server([binary])
    answer = server.ask("peak", 1)
    server.close()
    return bool(answer)


def flops(request):
    """Operations of a request; of attention those that the causal mask leaves: two products forward, five backward."""
    words = request.split()
    if words[0] == "gemm":
        m, k, n = map(int, words[1].split("x"))
        return 2 * m * k * n
    batch, heads, seq, d = (int(size.split("/")[0]) for size in words[2].split("x"))
    return (2 if words[1] == "forward" else 5) * batch * heads * seq * seq * d


def requests(quick):
    """Groups of requests; a group is a session."""
    groups = [[f"gemm {shape} {layout}" for layout in LAYOUTS] for shape in (PRODUCTS[1:3] if quick else PRODUCTS)]
    return groups + [[f"attention {way} {shape}" for way in ("forward", "backward")] for shape in (ATTENTIONS[:1] if quick else ATTENTIONS)]


def turns(order):
    """Seconds of each request, by thread count, of mcc and PyTorch in turns, with the peak between."""
    servers = {"mcc": Server([order["kernels"]]), "torch": Server([order["python"], "-m", "bench.peers.torch_kernels"])}
    answer = {"peaks": {}, "seconds": {}}
    for threads in (1, 2):
        peaks = answer["peaks"].setdefault(str(threads), [])
        seconds = answer["seconds"].setdefault(str(threads), {})
        for _ in range(order["rounds"]):
            for request in order["requests"]:
                for name, server in servers.items():
                    seconds.setdefault(request, {}).setdefault(name, []).extend(server.ask(request, threads))
                peaks.append(servers["mcc"].peak(threads))
    for server in servers.values():
        server.close()
    return answer


def summary(answer):
    """`{threads: {"peak_gflops", "gflops": {request: {contestant: ..}}}}`, of medians."""
    found = {}
    for threads, seconds in answer["seconds"].items():
        rates = {r: {name: flops(r) / statistics.median(s) / 1e9 for name, s in own.items() if s} for r, own in seconds.items()}
        found[threads] = {"peak_gflops": statistics.median(answer["peaks"][threads]), "gflops": rates}
    return found
