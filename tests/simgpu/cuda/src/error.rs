//! CUresult values and their names.

use std::ffi::CStr;

/// A CUresult other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Error(pub(crate) i32);

macro_rules! errors {
    ($($code:literal $short:ident $name:literal $text:literal)*) => {
        impl Error {
            $(#[allow(dead_code, reason = "some serve fault scripts only")]
            pub(crate) const $short: Self = Self($code);)*
        }

        fn entry(code: i32) -> Option<(&'static CStr, &'static CStr)> {
            match code {
                0 => Some((c"CUDA_SUCCESS", c"no error")),
                $($code => Some(($name, $text)),)*
                _ => None,
            }
        }

        /// The error with this name.
        pub(crate) fn by_name(name: &str) -> Option<Error> {
            $(if $name.to_bytes() == name.as_bytes() {
                return Some(Error($code));
            })*
            None
        }
    };
}

errors! {
    1 INVALID_VALUE c"CUDA_ERROR_INVALID_VALUE" c"invalid argument"
    2 OUT_OF_MEMORY c"CUDA_ERROR_OUT_OF_MEMORY" c"out of memory"
    3 NOT_INITIALIZED c"CUDA_ERROR_NOT_INITIALIZED" c"initialization error"
    100 NO_DEVICE c"CUDA_ERROR_NO_DEVICE" c"no CUDA-capable device is detected"
    101 INVALID_DEVICE c"CUDA_ERROR_INVALID_DEVICE" c"invalid device ordinal"
    200 INVALID_IMAGE c"CUDA_ERROR_INVALID_IMAGE" c"device kernel image is invalid"
    201 INVALID_CONTEXT c"CUDA_ERROR_INVALID_CONTEXT" c"invalid device context"
    304 OPERATING_SYSTEM c"CUDA_ERROR_OPERATING_SYSTEM" c"OS call failed or operation not supported"
    400 INVALID_HANDLE c"CUDA_ERROR_INVALID_HANDLE" c"invalid resource handle"
    401 ILLEGAL_STATE c"CUDA_ERROR_ILLEGAL_STATE" c"the operation cannot be performed in the present state"
    500 NOT_FOUND c"CUDA_ERROR_NOT_FOUND" c"named symbol not found"
    600 NOT_READY c"CUDA_ERROR_NOT_READY" c"device not ready"
    700 ILLEGAL_ADDRESS c"CUDA_ERROR_ILLEGAL_ADDRESS" c"an illegal memory access was encountered"
    704 PEER_ACCESS_ALREADY_ENABLED c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED" c"peer access already enabled"
    705 PEER_ACCESS_NOT_ENABLED c"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED" c"peer access has not been enabled"
    719 LAUNCH_FAILED c"CUDA_ERROR_LAUNCH_FAILED" c"unspecified launch failure"
    800 NOT_PERMITTED c"CUDA_ERROR_NOT_PERMITTED" c"operation not permitted"
    801 NOT_SUPPORTED c"CUDA_ERROR_NOT_SUPPORTED" c"operation not supported"
    999 UNKNOWN c"CUDA_ERROR_UNKNOWN" c"unknown error"
}

/// Name and description of a code that the driver knows.
pub(crate) fn describe(code: i32) -> Option<(&'static CStr, &'static CStr)> {
    entry(code)
}

/// The CUresult of a call.
pub(crate) fn answer(call: impl FnOnce() -> Result<(), Error>) -> i32 {
    match call() {
        Ok(()) => 0,
        Err(Error(code)) => code,
    }
}
