// An empty extension module: it lets setuptools build, place and version the library. The functions are
// plain C and are called through ctypes, so that one abi3 build serves every Python.
#include <Python.h>

static PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr,
};

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&module); }
