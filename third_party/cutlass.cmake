# Sets CUTLASS_INCLUDE_DIRS: the headers under CUTLASS_DIR, else those of the pinned nvidia-cutlass package.
set(CUTLASS_DIR "$ENV{CUTLASS_DIR}" CACHE PATH "a CUTLASS source tree, instead of the nvidia-cutlass package")
if(NOT CUTLASS_DIR)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
            "import importlib.util as u, os; s = u.find_spec('cutlass_library'); print(os.path.dirname(s.origin) if s else '')"
    OUTPUT_VARIABLE cutlass_package OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(cutlass_package)
    set(CUTLASS_DIR "${cutlass_package}/source")
  endif()
endif()
set(CUTLASS_INCLUDE_DIRS "${CUTLASS_DIR}/include" "${CUTLASS_DIR}/tools/util/include")
if(NOT EXISTS "${CUTLASS_DIR}/include/cute/tensor.hpp")
  message(FATAL_ERROR "CUTLASS headers not found: `pip install --no-deps nvidia-cutlass==4.2.0.0`, or set CUTLASS_DIR")
endif()
