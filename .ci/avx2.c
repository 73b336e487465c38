/* A library to preload on x86 Linux: programs see a processor that has AVX2 and nothing above it.

   The kernel lets a process trap CPUID (arch_prctl, ARCH_SET_CPUID); the handler answers without AVX-512, AMX and VNNI.
   /proc/cpuinfo is answered in the same way. OpenVINO, oneDNN, ONNX Runtime, llama.cpp, NumPy and torch all ask one of
   these. oneDNN's own limit (ONEDNN_MAX_CPU_ISA) holds oneDNN alone: OpenVINO then mixes both sets, and dies. */
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <cpuid.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <ucontext.h>
#include <unistd.h>

/* Bits of leaf 7: AVX-512 F, DQ, IFMA, PF, ER, CD, BW, VL; VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ; 4VNNIW, 4FMAPS,
   VP2INTERSECT, AMX-BF16, AVX512-FP16, AMX-TILE, AMX-INT8. Its other subleaves have nothing that is older. */
static const unsigned EBX = 0xdc230000, ECX = 0x5842, EDX = 0x3c0010c;

static struct sigaction program_action = {.sa_handler = SIG_DFL};

static int set_action(const struct sigaction *action) {
    int (*next)(int, const struct sigaction *, struct sigaction *) = dlsym(RTLD_NEXT, "sigaction");
    return next(SIGSEGV, action, NULL);
}

static long trap_cpuid(int trap) { return syscall(SYS_arch_prctl, ARCH_SET_CPUID, !trap); }

static void handle(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    if (info->si_code == SI_KERNEL && !memcmp((void *)registers[REG_RIP], "\x0f\xa2", 2)) {
        unsigned a, b, c, d, leaf = registers[REG_RAX], subleaf = registers[REG_RCX];
        trap_cpuid(0);
        __cpuid_count(leaf, subleaf, a, b, c, d);
        trap_cpuid(1);
        if (leaf == 7 && subleaf) a = b = c = d = 0;
        else if (leaf == 7) b &= ~EBX, c &= ~ECX, d &= ~EDX;
        registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
        registers[REG_RIP] += 2;
    } else if (program_action.sa_flags & SA_SIGINFO) program_action.sa_sigaction(number, info, context);
    else if (program_action.sa_handler == SIG_DFL || program_action.sa_handler == SIG_IGN) set_action(&program_action);
    else program_action.sa_handler(number);
}

/* The program's own handler comes second. */
int sigaction(int number, const struct sigaction *action, struct sigaction *old) {
    int (*next)(int, const struct sigaction *, struct sigaction *) = dlsym(RTLD_NEXT, "sigaction");
    if (number != SIGSEGV) return next(number, action, old);
    if (old) *old = program_action;
    if (action) program_action = *action;
    return 0;
}

static int open_cpuinfo(void) {
    static char text[1 << 20];
    int from = syscall(SYS_openat, AT_FDCWD, "/proc/cpuinfo", O_RDONLY), made = memfd_create("cpuinfo", MFD_CLOEXEC);
    ssize_t count, length = 0;
    while ((count = read(from, text + length, sizeof text - 1 - length)) > 0) length += count;
    close(from);
    text[length] = 0;
    for (char *word = text; (word = strpbrk(word, " \t"));) {
        size_t size = strcspn(++word, " \t\n");
        if (!strncmp(word, "avx512", 6) || !strncmp(word, "avx_", 4) || !strncmp(word, "amx_", 4)) memset(word, ' ', size);
    }
    if (write(made, text, length) != length) return -1;
    lseek(made, 0, SEEK_SET);
    return made;
}

#define OPEN(NAME)                                                                    \
    int NAME(const char *path, int flags, ...) {                                      \
        va_list rest;                                                                 \
        va_start(rest, flags);                                                        \
        mode_t mode = va_arg(rest, mode_t);                                           \
        va_end(rest);                                                                 \
        if (!strcmp(path, "/proc/cpuinfo")) return open_cpuinfo();                    \
        return ((int (*)(const char *, int, mode_t))dlsym(RTLD_NEXT, #NAME))(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

__attribute__((constructor)) static void start(void) {
    /* On the thread's own stack: OpenVINO's CPU plugin leaves threads with an alternate one that is unmapped. */
    struct sigaction own = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_NODEFER};
    set_action(&own);
    if (trap_cpuid(1)) dprintf(2, "avx2: this kernel cannot trap CPUID\n"), _exit(1);
}
