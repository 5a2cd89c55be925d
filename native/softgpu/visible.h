/* Devices that a process sees, and their order: CUDA_VISIBLE_DEVICES.  Programs use a device's position in that list (its
 * ordinal); internal functions use the device's number. */
#ifndef COTENANT_SOFT_VISIBLE_H
#define COTENANT_SOFT_VISIBLE_H

void soft_read_visible(void);      /* called by cuInit with soft_lock held */
int soft_visible_count(void);
int soft_device_at(int ordinal);   /* -1: no such device */
int soft_ordinal_of(int device);   /* -1: not visible */

#endif
