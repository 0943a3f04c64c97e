/* Callbacks of sys.monitoring that append to a mapped ring: about 0.19 us an event, where Python needs 4 us.

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
#define VALUE 4u
#define KIND_BIT 29
#define RETURNED 255u
#define NEAR 254u                        /* a float, rounded, before the hash of it */
#define OWN 253u                         /* a value without the numbers of this rank, likewise */
#define LENGTH 252u                      /* of a list or tuple, likewise */
#define EXACT (1u << 20)
#define SEED 0xcbf29ce484222325ull
#define ITEMS 8                          /* of a container that are read */
#define TEXT 64                          /* letters that are hashed */
#define SEARCHED 256                     /* letters in which numbers of the rank are looked for */

typedef struct { uint64_t head, capacity; } Head;
typedef struct { uint64_t ns; uint32_t code, line; } Entry;

static Py_buffer mapped;
static Head *head;
static Entry *entries;
static struct {
    PyObject *code, *by_line, *arguments;  /* see assigned.py */
    uint32_t id;
    int line, last;                        /* first line; the one whose values are due, 0 for none */
} codes[SLOTS];
static uint32_t num_codes;
static uint16_t times[SLOTS];            /* of a location in the current second */
static uint64_t second, in_second;
static uint64_t budget;                  /* events a second, above which frequent locations are silenced */
static uint16_t often;
static PyObject *disable, *restart, *is_followed, *first_start, *num_modes;
static PyObject *tensor, *parameter;     /* types */
static PyObject *dtype_type, *device_type;
static PyTypeObject *deque_type, *enum_type;
static PyObject *member_name;
static PyObject *shape, *dtype, *requires_grad, *is_contiguous;
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
    *entry = (Entry){ns, code, kind << KIND_BIT | (line & ((1u << KIND_BIT) - 1))};
    __atomic_store_n(&head->head, head->head + 1, __ATOMIC_RELEASE);
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static uint64_t mixed(uint64_t hash, const void *data, size_t size) {  /* FNV-1a */
    for (size_t at = 0; at < size; ++at) hash = (hash ^ ((const uint8_t *)data)[at]) * 0x100000001b3ull;
    return hash;
}

static uint64_t tagged(uint64_t hash, char tag, uint64_t number) {
    return mixed(mixed(hash, &tag, 1), &number, sizeof number);
}

static uint64_t hashed(uint64_t hash, PyObject *value, int depth);

static long long own[8];                 /* numbers of this rank */
static int num_own, leaves_out, has_digit, has_own;

static int is_own(long long number) {
    for (int at = 0; at < num_own; ++at) if (own[at] == number) return 1;
    return 0;
}

/* The hash of a text without the numbers of this rank. */
static uint64_t hashed_without_own(uint64_t hash, PyObject *text) {
    Py_ssize_t size = PyUnicode_GET_LENGTH(text) < SEARCHED ? PyUnicode_GET_LENGTH(text) : SEARCHED;
    uint32_t nothing = 0;
    hash = tagged(hash, 'S', 0);
    for (Py_ssize_t at = 0, num_read = 0; at < size;) {
        Py_ssize_t end = at;
        long long number = 0;
        for (; end < size && PyUnicode_READ_CHAR(text, end) - '0' < 10u; ++end)
            number = number < 1000000000000ll ? number * 10 + (PyUnicode_READ_CHAR(text, end) - '0') : number;
        if (end > at && is_own(number)) {
            has_own = 1;
            if (num_read++ < TEXT) hash = mixed(hash, &nothing, sizeof nothing);
            at = end;
            continue;
        }
        for (end = end > at ? end : at + 1; at < end; ++at) {
            uint32_t letter = PyUnicode_READ_CHAR(text, at);
            if (num_read++ < TEXT) hash = mixed(hash, &letter, sizeof letter);
        }
    }
    return hash;
}

/* The hash of the name of a dtype, which there is once in a process, or of a device. */
static uint64_t hashed_name(PyObject *value) {
    static struct { PyObject *dtype; uint64_t hash; } known[64];
    size_t slot = ((uintptr_t)value >> 4) % 64;
    int is_dtype = (PyObject *)Py_TYPE(value) == dtype_type;
    if (is_dtype && known[slot].dtype == value) return known[slot].hash;
    int had_digit = has_digit, was_left_out = leaves_out;
    if (is_dtype) leaves_out = 0;        /* the number in it is none of a rank */
    PyObject *text = PyObject_Str(value);
    uint64_t hash = text == NULL ? 0 : hashed(SEED, text, 0);
    PyErr_Clear();
    Py_XDECREF(text);
    if (is_dtype) has_digit = had_digit, leaves_out = was_left_out;
    if (is_dtype) known[slot].dtype = value, known[slot].hash = hash;
    return hash;
}

/* The hash of the name of a function, class or member of an enumeration, or of an object's class; 0 without one. */
static uint64_t hashed_as(uint64_t hash, PyObject *value) {
    char tag = 'O';
    PyObject *name = NULL;
    if (PyMethod_Check(value)) value = PyMethod_GET_FUNCTION(value);
    if (PyFunction_Check(value)) {
        tag = 'Q';
        name = Py_NewRef(((PyFunctionObject *)value)->func_qualname);
    } else if (PyType_Check(value)) {
        tag = 'K';
        name = PyType_GetName((PyTypeObject *)value);
    } else if (Py_TYPE(value)->tp_flags & Py_TPFLAGS_HEAPTYPE) {
        name = PyType_GetName(Py_TYPE(value));
        if (name != NULL && PyObject_TypeCheck((PyObject *)Py_TYPE(value), enum_type)) {
            tag = 'E';
            PyObject *member = PyObject_GenericGetAttr(value, member_name);
            PyObject *both = member == NULL ? NULL : PyUnicode_FromFormat("%U.%U", name, member);
            Py_XDECREF(member);
            Py_SETREF(name, both);
        }
    }
    int had_digit = has_digit, was_left_out = leaves_out;
    leaves_out = 0;                      /* a number in a name is none of a rank */
    uint64_t found = name == NULL ? 0 : hashed(tagged(hash, tag, 0), name, 0);
    has_digit = had_digit, leaves_out = was_left_out;
    PyErr_Clear();
    Py_XDECREF(name);
    return found;
}

/* The hash of a value, as `InPython` computes it; 0 for what says nothing about it. */
static uint64_t hashed(uint64_t hash, PyObject *value, int depth) {
    if (value == Py_None) return tagged(hash, 'N', 0);
    if (PyBool_Check(value)) return tagged(hash, 'B', value == Py_True);
    if (PyLong_Check(value)) {
        int overflows;
        long long number = PyLong_AsLongLongAndOverflow(value, &overflows);
        return tagged(hash, 'I', overflows ? 0 : (uint64_t)number);
    }
    if (PyFloat_Check(value)) {
        double number = PyFloat_AS_DOUBLE(value);
        uint64_t bits;
        memcpy(&bits, &number, sizeof bits);
        return tagged(hash, 'F', bits);
    }
    if (PyUnicode_Check(value)) {
        if (leaves_out) return hashed_without_own(hash, value);
        Py_ssize_t size = PyUnicode_GET_LENGTH(value);
        hash = tagged(hash, 'S', (uint64_t)size);
        for (Py_ssize_t at = 0; at < size && at < SEARCHED; ++at) {
            uint32_t letter = PyUnicode_READ_CHAR(value, at);
            has_digit |= letter - '0' < 10u;
            if (at < TEXT) hash = mixed(hash, &letter, sizeof letter);
        }
        return hash;
    }
    if ((PyTuple_Check(value) || PyList_Check(value)) && depth < 2) {
        Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
        hash = tagged(hash, 'C', (uint64_t)size);
        for (Py_ssize_t at = 0; at < size; ++at) {
            if (at == ITEMS / 2 && size > ITEMS) at = size - ITEMS / 2;  /* the last ones were appended */
            ++in_second;                 /* what is read counts as events do, a tensor as three */
            uint64_t item = hashed(hash, PySequence_Fast_GET_ITEM(value, at), depth + 1);
            if (item != 0) hash = item;
        }
        return hash;
    }
    if (PyDict_Check(value)) return tagged(hash, 'D', (uint64_t)PyDict_Size(value));
    if (PyAnySet_Check(value)) return tagged(hash, 'D', (uint64_t)PySet_Size(value));
    if (PyObject_TypeCheck(value, deque_type)) return tagged(hash, 'D', (uint64_t)Py_SIZE(value));
    if ((PyObject *)Py_TYPE(value) == dtype_type || (PyObject *)Py_TYPE(value) == device_type) {
        uint64_t name = hashed_name(value);
        return name == 0 ? 0 : tagged(hash, 'Y', name);
    }
    if ((PyObject *)Py_TYPE(value) != tensor && (PyObject *)Py_TYPE(value) != parameter) return hashed_as(hash, value);
    in_second += 2;
    PyObject *modes = PyObject_CallNoArgs(num_modes);  /* a mode would see the access */
    int has_modes = modes == NULL || PyObject_IsTrue(modes);
    Py_XDECREF(modes);
    if (has_modes) return PyErr_Clear(), 0;
    PyObject *parts[] = {PyObject_GetAttr(value, shape), PyObject_GetAttr(value, dtype),
                         PyObject_GetAttr(value, requires_grad), PyObject_CallMethodNoArgs(value, is_contiguous)};
    PyErr_Clear();
    uint64_t name = parts[1] == NULL ? 0 : hashed_name(parts[1]);
    hash = tagged(hash, 'T', parts[3] == Py_True);
    if (parts[0] == NULL || parts[2] == NULL || parts[3] == NULL || name == 0) hash = 0;
    else hash = hashed(tagged(hashed(hash, parts[0], 1), 'Y', name), parts[2], 1);
    PyErr_Clear();
    for (int at = 0; at < 4; ++at) Py_XDECREF(parts[at]);
    return hash;
}

static void append_value(uint64_t ns, uint32_t code, uint32_t number, PyObject *value) {
    uint32_t known;
    long small = -1;
    if (PyLong_CheckExact(value)) {
        int overflows;
        small = PyLong_AsLongAndOverflow(value, &overflows);
    }
    if (small >= 0 && small < (long)EXACT) {
        known = EXACT | (uint32_t)small;
    } else {
        has_digit = 0;
        uint64_t hash = hashed(SEED, value, 0);
        if (hash == 0) return;
        if (has_digit && num_own > 0) {
            has_own = 0;
            leaves_out = 1;
            uint64_t without = hashed(SEED, value, 0);
            leaves_out = 0;
            if (has_own) append(ns, code, VALUE, OWN << 21 | ((uint32_t)(without ^ without >> 20 ^ without >> 40) & (EXACT - 1)));
        }
        if (PyFloat_CheckExact(value)) {
            float rounded = (float)PyFloat_AS_DOUBLE(value);
            uint32_t bits;
            memcpy(&bits, &rounded, sizeof bits);
            append(ns, code, VALUE, NEAR << 21 | ((bits + 0x800u) >> 12 & (EXACT - 1)));
        }
        if (PyList_Check(value) || PyTuple_Check(value)) {
            uint64_t length = (uint64_t)Py_SIZE(value);
            append(ns, code, VALUE, LENGTH << 21 | (uint32_t)(length < EXACT ? length : EXACT - 1));
        }
        known = (uint32_t)(hash ^ hash >> 20 ^ hash >> 40) & (EXACT - 1);
    }
    append(ns, code, VALUE, number << 21 | known);
    ++in_second;
}

/* A new reference to what a variable holds, or an attribute of it that its object itself has; NULL without one. */
static PyObject *held(PyFrameObject *frame, PyObject *name, PyObject *attribute, int is_global) {
    PyObject *value;
    if (is_global) {
        PyObject *globals = PyFrame_GetGlobals(frame);
        value = Py_XNewRef(PyDict_GetItemWithError(globals, name));
        Py_DECREF(globals);
    } else {
        value = PyFrame_GetVar(frame, name);
    }
    if (value != NULL && attribute != Py_None) {
        PyObject *holder = value;
        int is_computed = _PyType_Lookup(Py_TYPE(holder), attribute) != NULL;  /* a property, a slot */
        value = is_computed ? NULL : PyObject_GenericGetAttr(holder, attribute);
        Py_DECREF(holder);
    }
    if (value == NULL) PyErr_Clear();
    return value;
}

static void append_values(size_t slot, PyObject *specs, uint64_t ns) {
    PyFrameObject *frame = PyEval_GetFrame();
    if (frame == NULL) return;
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(specs); ++at) {
        PyObject *spec = PyTuple_GET_ITEM(specs, at);
        PyObject *value = held(frame, PyTuple_GET_ITEM(spec, 1), PyTuple_GET_ITEM(spec, 2),
                               PyTuple_GET_ITEM(spec, 3) == Py_True);
        if (value == NULL) continue;
        append_value(ns, codes[slot].id, (uint32_t)PyLong_AsLong(PyTuple_GET_ITEM(spec, 0)), value);
        Py_DECREF(value);
    }
}

/* What the last line of this code gave a value, now that the frame goes on at `line`; 0 where it returns. */
static void append_due(size_t slot, uint64_t ns, long line) {
    Py_ssize_t offset = codes[slot].last - codes[slot].line;
    int is_due = codes[slot].last != 0;
    codes[slot].last = 0;
    if (!is_due || offset < 0 || offset >= PyTuple_GET_SIZE(codes[slot].by_line)) return;
    PyObject *stored = PyTuple_GET_ITEM(codes[slot].by_line, offset);
    if (stored == Py_None) return;
    int is_stored = PyLong_AsLong(PyTuple_GET_ITEM(stored, 0)) <= line && line <= PyLong_AsLong(PyTuple_GET_ITEM(stored, 1));
    if (is_stored) append_values(slot, PyTuple_GET_ITEM(stored, 2), ns);
}

static PyObject *on_event(PyObject *code, uint32_t kind, uint32_t line, PyObject *returned) {
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
    if (kind == LINE || kind == RETURN) append_due(slot, ns, (long)line);
    if (returned != NULL && returned != Py_None) append_value(ns, codes[slot].id, RETURNED, returned);
    append(ns, codes[slot].id, kind, line);
    if (kind == START) append_values(slot, codes[slot].arguments, ns);
    codes[slot].last = kind == LINE ? (int)line : 0;
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
    return on_event(args[0], LINE, (uint32_t)PyLong_AsLong(args[1]), NULL);
}
static PyObject *on_start(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    if (head == NULL) Py_RETURN_NONE;
    if (codes[slot_of(args[0])].code == NULL) {  /* Python decides whether to follow it */
        PyObject *found = PyObject_CallOneArg(first_start, args[0]);
        if (found == NULL || found == disable) return found;
        Py_DECREF(found);
    }
    return on_event(args[0], START, (uint32_t)((PyCodeObject *)args[0])->co_firstlineno, NULL);
}
static PyObject *on_return(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    return on_event(args[0], RETURN, 0, n > 2 ? args[2] : NULL);
}

static PyObject *add(PyObject *self, PyObject *args) {
    PyObject *code, *by_line, *arguments;
    unsigned int id;
    if (!PyArg_ParseTuple(args, "O!IO!O!", &PyCode_Type, &code, &id, &PyTuple_Type, &by_line, &PyTuple_Type,
                          &arguments))
        return NULL;
    size_t slot = slot_of(code);
    if (codes[slot].code == NULL && num_codes < SLOTS / 2) {
        codes[slot].code = Py_NewRef(code);  /* kept, so that no other code gets its address */
        codes[slot].by_line = Py_NewRef(by_line);
        codes[slot].arguments = Py_NewRef(arguments);
        codes[slot].id = id;
        codes[slot].line = ((PyCodeObject *)code)->co_firstlineno;
        codes[slot].last = 0;
        ++num_codes;
    }
    Py_RETURN_NONE;
}

static PyObject *know_own(PyObject *self, PyObject *numbers) {
    if (!PyTuple_Check(numbers)) return PyErr_Format(PyExc_TypeError, "the numbers of the rank are no tuple");
    num_own = 0;
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(numbers) && num_own < 8; ++at)
        own[num_own++] = PyLong_AsLongLong(PyTuple_GET_ITEM(numbers, at));
    if (PyErr_Occurred()) return NULL;
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
    for (size_t slot = 0; slot < SLOTS; ++slot) {
        Py_CLEAR(codes[slot].code);
        Py_CLEAR(codes[slot].by_line);
        Py_CLEAR(codes[slot].arguments);
    }
    num_codes = 0;
    memset(threads, 0, sizeof threads);
    Py_CLEAR(disable);
    Py_CLEAR(restart);
    Py_CLEAR(is_followed);
    Py_CLEAR(first_start);
    Py_CLEAR(num_modes);
    Py_CLEAR(tensor);
    Py_CLEAR(parameter);
    Py_CLEAR(dtype_type);
    Py_CLEAR(device_type);
    Py_RETURN_NONE;
}

static PyObject *attach(PyObject *self, PyObject *args) {
    PyObject *buffer, *disable_, *restart_, *is_followed_, *first_start_, *tensor_, *parameter_, *num_modes_;
    PyObject *dtype_, *device_;
    unsigned long long budget_;
    unsigned short often_;
    if (!PyArg_ParseTuple(args, "OOOOOKHOOOOO", &buffer, &disable_, &restart_, &is_followed_, &first_start_, &budget_,
                          &often_, &tensor_, &parameter_, &num_modes_, &dtype_, &device_))
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
    tensor = Py_NewRef(tensor_);
    parameter = Py_NewRef(parameter_);
    num_modes = Py_NewRef(num_modes_);
    dtype_type = Py_NewRef(dtype_);
    device_type = Py_NewRef(device_);
    budget = budget_;
    often = often_;
    second = in_second = 0;
    is_paused = num_disabled = num_own = 0;
    entries = (Entry *)((char *)mapped.buf + HEADER);
    head = found;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"attach", attach, METH_VARARGS, "(buffer, DISABLE, restart, is_followed, first_start, budget, often, *tensors)"},
    {"detach", detach, METH_NOARGS, ""},
    {"add", add, METH_VARARGS, "(code, id, by_line, arguments)"},
    {"know_own", know_own, METH_O, "(numbers)"},
    {"mark", mark, METH_VARARGS, "(id, number)"},
    {"pause", pause_, METH_VARARGS, "(is_paused)"},
    {"on_line", (PyCFunction)(void *)on_line, METH_FASTCALL, ""},
    {"on_start", (PyCFunction)(void *)on_start, METH_FASTCALL, ""},
    {"on_return", (PyCFunction)(void *)on_return, METH_FASTCALL, ""},
    {0},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tpcompile_flow", 0, -1, methods};
static PyTypeObject *class_in(const char *module_name, const char *name) {
    PyObject *found = PyImport_ImportModule(module_name);
    PyObject *class = found == NULL ? NULL : PyObject_GetAttrString(found, name);
    Py_XDECREF(found);
    return (PyTypeObject *)class;
}

PyMODINIT_FUNC PyInit_tpcompile_flow(void) {
    shape = PyUnicode_InternFromString("shape");
    dtype = PyUnicode_InternFromString("dtype");
    requires_grad = PyUnicode_InternFromString("requires_grad");
    is_contiguous = PyUnicode_InternFromString("is_contiguous");
    member_name = PyUnicode_InternFromString("_name_");
    deque_type = class_in("collections", "deque");
    enum_type = class_in("enum", "EnumType");
    int has_names = shape != NULL && dtype != NULL && requires_grad != NULL && is_contiguous != NULL;
    return has_names && member_name && deque_type && enum_type ? PyModule_Create(&module) : NULL;
}
