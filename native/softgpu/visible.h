/* The devices that a process sees, in the order of CUDA_VISIBLE_DEVICES. Programs use a device's position in that
 * list (its ordinal); functions of the software GPU use the device's number. */
#ifndef COTENANT_SOFT_VISIBLE_H
#define COTENANT_SOFT_VISIBLE_H

void soft_read_visible(void);      /* called by cuInit with soft_lock held */
int soft_visible_count(void);
/* returns the number of the device with this position in the list; -1 if there is none */
int soft_device_at(int ordinal);
int soft_ordinal_of(int device);   /* returns the position of the device in the list; -1 if the device is not visible */

#endif
