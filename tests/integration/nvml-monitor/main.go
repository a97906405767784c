// Prints as JSON what a monitor that uses NVIDIA's bindings of NVML (go-nvml) asks of every GPU.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// A process that has memory of a GPU.
type process struct {
	Pid  uint32 `json:"pid"`
	Used uint64 `json:"used"`
}

type gpu struct {
	Uuid      string            `json:"uuid"`
	Name      string            `json:"name"`
	Total     uint64            `json:"total"`
	Used      uint64            `json:"used"`
	Processes []process         `json:"processes"`
	Answers   map[string]string `json:"answers"`
}

func main() {
	gpus, err := look()
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(gpus)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "nvml-monitor:", err)
		os.Exit(1)
	}
}

func look() ([]gpu, error) {
	if code := nvml.Init(); code != nvml.SUCCESS {
		return nil, fmt.Errorf("nvmlInit: %w", code)
	}
	defer nvml.Shutdown()
	count, code := nvml.DeviceGetCount()
	if code != nvml.SUCCESS {
		return nil, fmt.Errorf("nvmlDeviceGetCount: %w", code)
	}
	gpus := make([]gpu, count)
	for index := range gpus {
		device, code := nvml.DeviceGetHandleByIndex(index)
		if code != nvml.SUCCESS {
			return nil, fmt.Errorf("GPU %d: %w", index, code)
		}
		var err error
		if gpus[index], err = lookAt(device); err != nil {
			return nil, fmt.Errorf("GPU %d: %w", index, err)
		}
	}
	return gpus, nil
}

func lookAt(device nvml.Device) (gpu, error) {
	uuid, ofUuid := device.GetUUID()
	name, ofName := device.GetName()
	memory, ofMemory := device.GetMemoryInfo()
	newer, ofNewer := device.GetMemoryInfo_v2()
	compute, ofCompute := device.GetComputeRunningProcesses()
	graphics, ofGraphics := device.GetGraphicsRunningProcesses()
	for _, code := range []nvml.Return{ofUuid, ofName, ofMemory, ofNewer, ofCompute, ofGraphics} {
		if code != nvml.SUCCESS {
			return gpu{}, code
		}
	}
	if memory.Used != newer.Used || memory.Total != newer.Total {
		return gpu{}, errors.New("the two forms of its memory differ")
	}
	seen := gpu{Uuid: uuid, Name: name, Total: memory.Total, Used: memory.Used, Processes: []process{}}
	for _, found := range append(compute, graphics...) {
		seen.Processes = append(seen.Processes, process{found.Pid, found.UsedGpuMemory})
	}
	seen.Answers = others(device)
	return seen, nil
}

// What else exporters of metrics ask; a driver may answer that it does not support it.
func others(device nvml.Device) map[string]string {
	answers := map[string]string{}
	note := func(call string, code nvml.Return) { answers[call] = code.String() }
	_, code := device.GetUtilizationRates()
	note("utilisation", code)
	_, code = device.GetProcessUtilization(0)
	note("utilisation by process", code)
	_, code = device.GetTemperature(nvml.TEMPERATURE_GPU)
	note("temperature", code)
	_, code = device.GetPowerUsage()
	note("power", code)
	_, code = device.GetClockInfo(nvml.CLOCK_SM)
	note("clock", code)
	_, _, code = device.GetEccMode()
	note("ECC", code)
	_, code = device.GetTotalEnergyConsumption()
	note("energy", code)
	_, code = device.GetComputeMode()
	note("compute mode", code)
	return answers
}
