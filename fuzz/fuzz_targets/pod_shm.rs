#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| firn_hook::pod_shm(data));
