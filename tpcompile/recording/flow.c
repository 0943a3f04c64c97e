/* Callbacks of sys.monitoring that append to a mapped ring: about 0.08 us an event, where Python needs 1 us.

   A ring is {uint64 head, uint64 capacity, ...} of HEADER bytes, then `capacity` entries of 16 bytes:
   uint64 ns (CLOCK_REALTIME, as the flight recorder's), uint32 code, uint32 kind << 30 | line. Its one reader takes
   what lies before `head`, so the entry is written first. All runs under the GIL. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <time.h>

#define HEADER 64
#define SLOTS (1 << 16)
#define LINE 0u
#define START 1u
#define RETURN 2u
#define MARK 3u

typedef struct { uint64_t head, capacity; } Head;
typedef struct { uint64_t ns; uint32_t code, line; } Entry;

static Py_buffer mapped;
static Head *head;
static Entry *entries;
static struct { PyObject *code; uint32_t id; } codes[SLOTS];
static uint32_t num_codes;
static uint16_t times[SLOTS];            /* of a location in the current second */
static uint64_t second, in_second;
static uint64_t budget;                  /* events a second, above which frequent locations are silenced */
static uint16_t often;
static PyObject *disable, *restart, *is_followed, *first_start;
static int is_paused, num_disabled;
static struct { unsigned long ident; int followed; } threads[64];

static size_t slot_of(PyObject *code) {
    size_t slot = ((uintptr_t)code >> 4) * 0x9E3779B97F4A7C15ull >> 48;
    while (codes[slot].code != NULL && codes[slot].code != code) slot = (slot + 1) & (SLOTS - 1);
    return slot;
}

static int follows_thread(void) {
    unsigned long ident = PyThread_get_thread_ident();
    size_t slot = (ident >> 6) * 0x9E3779B97F4A7C15ull >> 58;
    if (threads[slot].ident != ident) {  /* a thread that takes the slot of another one is asked for again */
        PyObject *found = PyObject_CallFunction(is_followed, "k", ident);
        if (found == NULL) return -1;
        threads[slot].ident = ident;
        threads[slot].followed = PyObject_IsTrue(found);
        Py_DECREF(found);
    }
    return threads[slot].followed;
}

static void append(uint64_t ns, uint32_t code, uint32_t kind, uint32_t line) {
    Entry *entry = &entries[head->head % head->capacity];
    *entry = (Entry){ns, code, kind << 30 | (line & 0x3fffffffu)};
    __atomic_store_n(&head->head, head->head + 1, __ATOMIC_RELEASE);
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static PyObject *on_event(PyObject *code, uint32_t kind, uint32_t line) {
    if (head == NULL || is_paused) Py_RETURN_NONE;
    int followed = follows_thread();
    if (followed < 0) return NULL;
    size_t slot = slot_of(code);
    if (!followed || codes[slot].code == NULL) Py_RETURN_NONE;
    uint64_t ns = now_ns();
    if (ns / 1000000000ull != second) {
        second = ns / 1000000000ull;
        in_second = 0;
        memset(times, 0, sizeof times);
        if (num_disabled) {
            num_disabled = 0;
            PyObject *done = PyObject_CallNoArgs(restart);
            if (done == NULL) return NULL;
            Py_DECREF(done);
        }
    }
    append(ns, codes[slot].id, kind, line);
    uint16_t *count = &times[(codes[slot].id * 0x9E3779B1u + line * 4 + kind) >> 8 & (SLOTS - 1)];
    if (*count < UINT16_MAX) ++*count;
    if (++in_second > budget && *count > often) {
        ++num_disabled;
        append(ns, codes[slot].id, MARK, 0);  /* until the next second some of its steps are missing */
        return Py_NewRef(disable);
    }
    Py_RETURN_NONE;
}

static PyObject *on_line(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    return on_event(args[0], LINE, (uint32_t)PyLong_AsLong(args[1]));
}
static PyObject *on_start(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    if (head == NULL) Py_RETURN_NONE;
    if (codes[slot_of(args[0])].code == NULL) {  /* Python decides whether to follow it */
        PyObject *found = PyObject_CallOneArg(first_start, args[0]);
        if (found == NULL || found == disable) return found;
        Py_DECREF(found);
    }
    return on_event(args[0], START, (uint32_t)((PyCodeObject *)args[0])->co_firstlineno);
}
static PyObject *on_return(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    return on_event(args[0], RETURN, 0);
}

static PyObject *add(PyObject *self, PyObject *args) {
    PyObject *code;
    unsigned int id;
    if (!PyArg_ParseTuple(args, "O!I", &PyCode_Type, &code, &id)) return NULL;
    size_t slot = slot_of(code);
    if (codes[slot].code == NULL && num_codes < SLOTS / 2) {
        codes[slot].code = Py_NewRef(code);  /* kept, so that no other code gets its address */
        codes[slot].id = id;
        ++num_codes;
    }
    Py_RETURN_NONE;
}

static PyObject *mark(PyObject *self, PyObject *args) {
    unsigned int id, number;
    if (!PyArg_ParseTuple(args, "II", &id, &number)) return NULL;
    if (head != NULL && !is_paused) append(now_ns(), id, MARK, number);
    Py_RETURN_NONE;
}

static PyObject *pause_(PyObject *self, PyObject *args) {
    if (!PyArg_ParseTuple(args, "p", &is_paused)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *detach(PyObject *self, PyObject *none) {
    if (head != NULL) {
        head = NULL;
        PyBuffer_Release(&mapped);
    }
    for (size_t slot = 0; slot < SLOTS; ++slot) Py_CLEAR(codes[slot].code);
    num_codes = 0;
    memset(threads, 0, sizeof threads);
    Py_CLEAR(disable);
    Py_CLEAR(restart);
    Py_CLEAR(is_followed);
    Py_CLEAR(first_start);
    Py_RETURN_NONE;
}

static PyObject *attach(PyObject *self, PyObject *args) {
    PyObject *buffer, *disable_, *restart_, *is_followed_, *first_start_;
    unsigned long long budget_;
    unsigned short often_;
    if (!PyArg_ParseTuple(args, "OOOOOKH", &buffer, &disable_, &restart_, &is_followed_, &first_start_, &budget_,
                          &often_))
        return NULL;
    Py_XDECREF(detach(self, NULL));
    if (PyObject_GetBuffer(buffer, &mapped, PyBUF_WRITABLE) < 0) return NULL;
    Head *found = mapped.buf;
    if (mapped.len < HEADER || (uint64_t)mapped.len < HEADER + found->capacity * sizeof(Entry)) {
        PyBuffer_Release(&mapped);
        PyErr_SetString(PyExc_ValueError, "the ring is smaller than its header says");
        return NULL;
    }
    disable = Py_NewRef(disable_);
    restart = Py_NewRef(restart_);
    is_followed = Py_NewRef(is_followed_);
    first_start = Py_NewRef(first_start_);
    budget = budget_;
    often = often_;
    second = in_second = 0;
    is_paused = num_disabled = 0;
    entries = (Entry *)((char *)mapped.buf + HEADER);
    head = found;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"attach", attach, METH_VARARGS, "(buffer, DISABLE, restart, is_followed, first_start, budget, often)"},
    {"detach", detach, METH_NOARGS, ""},
    {"add", add, METH_VARARGS, "(code, id)"},
    {"mark", mark, METH_VARARGS, "(id, number)"},
    {"pause", pause_, METH_VARARGS, "(is_paused)"},
    {"on_line", (PyCFunction)(void *)on_line, METH_FASTCALL, ""},
    {"on_start", (PyCFunction)(void *)on_start, METH_FASTCALL, ""},
    {"on_return", (PyCFunction)(void *)on_return, METH_FASTCALL, ""},
    {0},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tpcompile_flow", 0, -1, methods};
PyMODINIT_FUNC PyInit_tpcompile_flow(void) { return PyModule_Create(&module); }
