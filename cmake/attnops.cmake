# A module of stable-ABI ops. Python has loaded torch before it loads these, so library names suffice and no rpath is
# needed.
function(attnops_module name)
  add_library(${name} MODULE ${ARGN})
  target_include_directories(${name} PRIVATE csrc)
  target_include_directories(${name} SYSTEM PRIVATE ${ATTNOPS_TORCH}/include ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  if(ATTNOPS_SANITIZE MATCHES "thread")
    target_compile_options(${name} PRIVATE -include torch_bindings/tsan_parallel.h)
  endif()
  target_compile_definitions(${name} PRIVATE TORCH_TARGET_VERSION=0x020a000000000000) # torch 2.10
  target_link_directories(${name} PRIVATE ${ATTNOPS_TORCH}/lib)
  set_target_properties(${name} PROPERTIES PREFIX "" SKIP_BUILD_RPATH ON)
endfunction()

# Kernels see csrc and CUTLASS, never torch.
function(attnops_kernels folder archs)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS csrc/${ATTNOPS_FAMILIES}/${folder}/*.cu)
  if(NOT sources)
    return()
  endif()
  add_library(kernels_${folder} OBJECT ${sources})
  target_include_directories(kernels_${folder} PRIVATE csrc)
  target_include_directories(kernels_${folder} SYSTEM PRIVATE ${CUTLASS_INCLUDE_DIRS})
  # Line numbers are two thirds of a compressed kernel: for profiling only.
  set(options --expt-relaxed-constexpr)
  if(ATTNOPS_LINEINFO)
    list(APPEND options -lineinfo)
  endif()
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    list(APPEND options --compress-mode=size)
  else()
    list(APPEND options -Xfatbin=-compress-all)
  endif()
  target_compile_options(kernels_${folder} PRIVATE ${options})
  set_target_properties(kernels_${folder} PROPERTIES CUDA_ARCHITECTURES "${archs}")
  string(TOUPPER ${folder} upper)
  target_compile_definitions(_C_cuda PRIVATE ATTNOPS_HAS_${upper})
  target_link_libraries(_C_cuda PRIVATE kernels_${folder})
endfunction()

# A CPU source named <isa>_*.cpp is compiled for that instruction set and called only where the processor has it.
# AMX-bf16 code may use AVX-512-bf16 too: every processor with the first has the second.
set(ATTNOPS_ISA_avx2 -mavx2 -mfma -mf16c)
# GCC 12 and 13 take the undefined operands inside their own AVX-512 intrinsics for uninitialized variables.
set(ATTNOPS_ISA_avx512 ${ATTNOPS_ISA_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512
    -Wno-maybe-uninitialized -Wno-uninitialized)
set(ATTNOPS_ISA_avx512bf16 ${ATTNOPS_ISA_avx512} -mavx512bf16 -mavx512vbmi)
set(ATTNOPS_ISA_amx ${ATTNOPS_ISA_avx512bf16} -mamx-tile -mamx-bf16)
function(attnops_isa_flags)
  foreach(source ${ARGN})
    get_filename_component(file ${source} NAME)
    set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "-O3")
    if(file MATCHES "^(avx2|avx512bf16|avx512|amx)_")
      set(isa ${CMAKE_MATCH_1})
      set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "-O3;${ATTNOPS_ISA_${isa}}")
      # Loops with the bits of their scalar form: a product is rounded before it is added.
      if(file MATCHES "_(row_rounding|entry_values)\\.cpp$")
        set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS -ffp-contract=off)
      endif()
    endif()
  endforeach()
endfunction()

# Instruments every module that is built. A finding ends the process, so that tests fail.
function(attnops_sanitize sanitizers)
  if(NOT sanitizers)
    return()
  endif()
  add_compile_options(-fsanitize=${sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${sanitizers})
endfunction()
