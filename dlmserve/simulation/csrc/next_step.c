// The next step of a simulated block: what `unmasking.NextStep` computes, in a fiftieth of the time. numpy's cost
// is by call, and a block has only 32 scores. Floats are added in the same order, so the scores are equal to the bit.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>

#define MAX_LENGTH 32

// Borrowed: the Python object that holds the capsule holds the arrays too.
typedef struct {
    Py_ssize_t num_rows, length, num_knots;
    const float *own, *fresh;      // [num_rows, length]
    const float *places;           // [length]
    const float *shifts;           // [length + 1, length], by masks left and by the first of them
    const double *knots, *logits;  // [num_knots], ascending
} Tables;

static const char NAME[] = "dlmserve.simulation.tables";

static void free_tables(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, NAME)); }

static PyObject *tables(PyObject *module, PyObject *args) {
    Tables t;
    unsigned long long at[6];
    if (!PyArg_ParseTuple(args, "nnnKKKKKK", &t.num_rows, &t.length, &t.num_knots, at, at + 1, at + 2, at + 3,
                          at + 4, at + 5))
        return NULL;
    if (t.length < 1 || t.length > MAX_LENGTH || t.num_knots < 2)
        return PyErr_Format(PyExc_ValueError, "blocks of %zd tokens and %zd knots; wanted 1 to %d, and at least 2",
                            t.length, t.num_knots, MAX_LENGTH);
    t.own = (const float *)(uintptr_t)at[0];
    t.fresh = (const float *)(uintptr_t)at[1];
    t.places = (const float *)(uintptr_t)at[2];
    t.shifts = (const float *)(uintptr_t)at[3];
    t.knots = (const double *)(uintptr_t)at[4];
    t.logits = (const double *)(uintptr_t)at[5];
    Tables *kept = PyMem_Malloc(sizeof t);
    if (!kept) return PyErr_NoMemory();
    *kept = t;
    PyObject *capsule = PyCapsule_New(kept, NAME, free_tables);
    if (!capsule) PyMem_Free(kept);
    return capsule;
}

static double confidence(const Tables *t, double score) {
    const double *x = t->knots, *y = t->logits;
    Py_ssize_t last = t->num_knots - 1, at = 0;
    double logit;
    if (score <= x[0]) {
        logit = y[0];
    } else if (score >= x[last]) {
        logit = y[last];
    } else {
        while (score >= x[at + 1]) at++;
        logit = (y[at + 1] - y[at]) / (x[at + 1] - x[at]) * (score - x[at]) + y[at];
    }
    return 1 / (1 + exp(-logit));
}

// Steals both; NULL where either is.
static int put(PyObject *list, Py_ssize_t at, PyObject *item) { return item ? PyList_SetItem(list, at, item) : -1; }

static PyObject *result_of(const Tables *t, const float *score, uint32_t chosen, uint32_t left) {
    Py_ssize_t num = 0;
    for (uint32_t rest = chosen; rest; rest &= rest - 1) num++;
    PyObject *positions = PyList_New(num), *confidences = PyList_New(num), *result = NULL;
    if (!positions || !confidences) goto done;
    Py_ssize_t at = 0;
    for (Py_ssize_t j = 0; j < t->length; j++) {
        if (!(chosen >> j & 1)) continue;
        if (put(positions, at, PyLong_FromSsize_t(j))) goto done;
        if (put(confidences, at, PyFloat_FromDouble(confidence(t, score[j])))) goto done;
        at++;
    }
    result = Py_BuildValue("OOk", positions, confidences, (unsigned long)left);
done:
    Py_XDECREF(positions);
    Py_XDECREF(confidences);
    return result;
}

static PyObject *next_step(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 6) return PyErr_Format(PyExc_TypeError, "%zd arguments; wanted 6", num_args);
    const Tables *t = PyCapsule_GetPointer(args[0], NAME);
    Py_ssize_t own_row = PyLong_AsSsize_t(args[1]), fresh_row = PyLong_AsSsize_t(args[2]);
    unsigned long long bits = PyLong_AsUnsignedLongLong(args[3]);
    float ease = (float)PyFloat_AsDouble(args[4]), cut = (float)PyFloat_AsDouble(args[5]);
    if (!t || PyErr_Occurred()) return NULL;
    if (own_row < 0 || own_row >= t->num_rows || fresh_row < 0 || fresh_row >= t->num_rows)
        return PyErr_Format(PyExc_ValueError, "rows %zd and %zd of noise; there are %zd", own_row, fresh_row, t->num_rows);
    if (!bits || bits >> t->length)
        return PyErr_Format(PyExc_ValueError, "masked is %llu; wanted a bit or more of the block's %zd", bits, t->length);

    uint32_t masked = (uint32_t)bits;
    Py_ssize_t first = 0, num_left = 0;
    while (!(masked >> first & 1)) first++;
    for (uint32_t rest = masked; rest; rest &= rest - 1) num_left++;
    const float *own = t->own + own_row * t->length, *fresh = t->fresh + fresh_row * t->length;
    const float shift = t->shifts[num_left * t->length + first];
    float score[MAX_LENGTH], best = -INFINITY;
    for (Py_ssize_t j = 0; j < t->length; j++) {
        score[j] = own[j] + (ease - t->places[j]) + fresh[j] + shift;
        if (masked >> j & 1 && score[j] > best) best = score[j];
    }
    if (best < cut) cut = best;
    uint32_t chosen = 0;
    for (Py_ssize_t j = 0; j < t->length; j++)
        if (masked >> j & 1 && score[j] >= cut) chosen |= (uint32_t)1 << j;
    return result_of(t, score, chosen, masked & ~chosen);
}

static PyMethodDef methods[] = {
    {"tables", tables, METH_VARARGS, NULL},
    {"next_step", (PyCFunction)(void (*)(void))next_step, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_next_step", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__next_step(void) { return PyModule_Create(&module); }
